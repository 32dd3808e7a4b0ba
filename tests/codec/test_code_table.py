"""The table of codes: each row is true of its codec, a name is what its row says, and the page lists all."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pages import generated, renew

from headrace.codec.table import CODES, code_of_kind, code_to_write, written_codes
from headrace.terms.coding import decodes_of
from headrace.terms.errors import ConfigError

SCRIPT = "tests/codec/test_code_table.py"


@pytest.mark.parametrize("name", CODES)
def test_a_row_is_true_of_its_codec(name: str) -> None:
    """Its kind is that by which its codecs' weights are counted, and a large matrix takes the bits that it says."""
    row, rows, columns = CODES[name], 128, 4096
    assert row.name == name
    codec = (row.measured or row.codec)()
    assert decodes_of([(codec.name, 5)]) == ((row.kind, 5),)
    weights = row.sample(rows, columns) if row.sample else torch.randn(rows, columns)
    codec = codec if name != "mxfp4" else type(codec)(rows)  # type: ignore[call-arg]  # it is for stacks of that many rows
    parts = codec.encode(weights)
    assert sum(part.nbytes for part in parts.values()) == pytest.approx(row.matrix_bytes(rows, columns), rel=0.03)
    into = torch.empty(rows, columns, dtype=torch.bfloat16)
    codec.decode(parts, into, range(rows))
    assert torch.equal(into.float(), weights.bfloat16().float()) or not row.lossless


@given(st.text().filter(lambda name: name not in CODES))
def test_an_unknown_name_is_refused_with_those_that_are_there(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        code_to_write("to", name)
    assert str(caught.value) == f"to: expected int4 or ternary or sparse50 or bf16x12, found {name!r}"


@pytest.mark.parametrize("name", [code.name for code in CODES.values() if not code.is_written])
def test_what_is_only_read_is_not_written(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"to: expected int4 or ternary or sparse50 or bf16x12, found {name}, which is only read"
    ):
        code_to_write("to", name)


def test_a_name_is_its_own_code() -> None:
    assert [code_to_write("to", code.name) for code in written_codes()] == list(written_codes())
    rounding = [code.target(64).name for code in written_codes() if code.target]
    direct = [code.direct().name for code in written_codes() if code.direct]
    assert [*rounding, *direct] == [code.name for code in written_codes()]
    assert [code.needs_data for code in written_codes()] == [bool(code.target) for code in written_codes()]
    assert code_of_kind("pack") is CODES["int4"]
    assert code_of_kind("a program's own") is CODES["fp8"]


def codes() -> str:
    """Return the table of docs/compress.md."""
    lines = ["", "| code | what a weight is | bits |", "|---|---|---|"]
    for code in CODES.values():
        bits = f"{code.bits:.4g}" + (f"; {code.zeros.bits:.4g} with {code.zeros.otherwise} of zeros" if code.zeros else "")
        more = [*([] if code.is_written else ["only read"]), *(["loses nothing"] if code.lossless else [])]
        lines.append(f"| `{code.name}` | {code.words} ({', '.join([code.files, *more])}) | {bits} |")
    return "\n".join([*lines, "", ""])


def test_the_page_lists_the_table() -> None:
    assert generated("compress.md", SCRIPT) == codes(), f"run: PYTHONPATH=tests python {SCRIPT}"


def test_the_table_is_read_without_torch() -> None:
    program = "import sys, headrace.codec.table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=280).returncode == 0


if __name__ == "__main__":
    renew("compress.md", SCRIPT, codes())
