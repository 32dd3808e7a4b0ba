"""Sizes are read as people write them; what is none is refused as such. Run: pytest tests/terms/test_sizes.py"""

import pytest

from headrace.terms.errors import ConfigError
from headrace.terms.sizes import GIB, parse_bytes


def test_units_are_binary_unless_they_say_otherwise() -> None:
    assert parse_bytes("16GiB") == parse_bytes("16G") == 16 * GIB
    assert parse_bytes("16gb") == 16 * 10**9
    assert parse_bytes(" 1.5 KiB ") == 1536
    assert parse_bytes(4096) == parse_bytes("4096") == 4096
    assert parse_bytes(1 << 62) == parse_bytes(f"{1 << 22}T") == 1 << 62


@pytest.mark.parametrize(
    "text", ["9" * 400 + "GiB", "9" * 5000, "1" + "0" * 300, f"{1 << 22}.1T", (1 << 62) + 1, 10**400], ids=range(6)
)
def test_a_size_beyond_any_machine_is_refused_in_a_line(text: str | int) -> None:
    with pytest.raises(
        ConfigError, match=r"^host memory: .* is more than any machine has; the most is 4194304 TiB$"
    ) as refusal:
        parse_bytes(text, name="host memory")
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize("text", ["0", "0.0G", 0, -1, -(10**400)], ids=range(5))
def test_a_size_is_positive(text: str | int) -> None:
    with pytest.raises(ConfigError, match="is not a positive size"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["", "GiB", "16 apples", "-1G", "1e9", "nan", "inf", "x" * 5000], ids=range(8))
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size; write a number and a unit") as refusal:
        parse_bytes(text)
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize("value", [True, None, 1.5, [16]])
def test_what_is_neither_text_nor_number_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="expected a size such as 16GiB"):
        parse_bytes(value)  # type: ignore[arg-type]
