"""What people read of a generation's plan: milliseconds of a token first, the first answer apart, ten lines, honest guesses."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from headrace.cli.app import main
from headrace.terms.sizes import about_seconds, rough_figure
from headrace.terms.tables import MOST_LINES, ten_lines

UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


@given(st.floats(1e-3, 1e6))
@settings(deadline=None)
def test_a_guess_is_near_what_it_stands_for_and_has_two_digits_at_most(seconds: float) -> None:
    found = re.fullmatch(r"about ([0-9.]+) (\w+)", about_seconds(seconds))
    assert found is not None
    assert len(found[1].replace(".", "").strip("0")) <= 2
    assert float(found[1]) * UNITS[found[2]] == pytest.approx(seconds, rel=0.26)


def test_guesses_are_written_as_people_write_them() -> None:
    assert (about_seconds(0.037412), about_seconds(1.44), about_seconds(245), about_seconds(8000)) == (
        "about 40 ms",
        "about 1.4 s",
        "about 4 min",
        "about 2 h",
    )
    assert rough_figure(1859) == "1900"


def test_ten_lines_stand_and_the_last_counts_the_others() -> None:
    assert ten_lines("abcdefghij").splitlines() == list("abcdefghij")
    shown = ten_lines("abcdefghijkl").splitlines()
    assert len(shown) == MOST_LINES
    assert shown[-1].split(maxsplit=1) == ["more", "3 lines: --verbose"]


def said(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> list[str]:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1000}
    LlamaConfig(**sizes, num_attention_heads=4, dtype="bfloat16").save_pretrained(folder)
    with pytest.raises(SystemExit) as left:
        main(["plan", str(folder), "--generate", "--prompt-length", "64", "--new-tokens", "8", "--host-memory", "1GiB", *more])
    assert not left.value.code
    return capsys.readouterr().out.splitlines()


def test_milliseconds_of_a_token_come_first_and_the_first_answer_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    brief = said(tmp_path, capsys, "--machine", "desktop-4090")
    assert len(brief) <= MOST_LINES
    assert not any("program" in line or "libraries" in line for line in brief)
    (speed,) = (line for line in brief if line.startswith("speed"))
    assert re.match(r"speed    \d+ ms a token, [0-9.]+ tokens/s on desktop-4090; limited by ", speed)
    (first,) = (line for line in brief if line.startswith("first"))
    assert re.match(r"first    .+ to the first token.*; .+ for the whole answer", first)
    whole = said(tmp_path, capsys, "--machine", "desktop-4090", "--verbose")
    assert any("program" in line for line in whole)
