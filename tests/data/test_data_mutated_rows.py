"""No row ends in a traceback: it becomes tokens, is left out and counted, or is refused by file and line."""

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from chat_templates import TEMPLATES, tokenizer_of
from conversations import TOOL, row_of, said, turns
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutated import mutated
from tiers import sampled

from headrace.data import DataSpec, load_tokens
from headrace.terms.errors import DataError

_NAMED = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation"}
_SHARE_GPT = [{"from": _NAMED[each["role"]], "value": each["content"]} for each in turns("suaua")]
_CALL = {"from": "function_call", "value": '{"name": "find1", "arguments": {"city": "w1a"}}'}
FLAGS = [{**each, "weight": index % 2, "train": True, "name": "n"} for index, each in enumerate(turns("suaua"))]
ROWS: dict[str, list[dict[str, Any]]] = {
    "messages": [row_of("system"), {"messages": FLAGS}, row_of("parts"), {**row_of("three"), "system": "s", "images": []}],
    "calls": [row_of("parallel"), row_of("call-text"), row_of("call-thought"), {**row_of("call"), "tools": json.dumps([TOOL])}],
    "ShareGPT": [
        {"conversations": _SHARE_GPT, "system": "be brief", "tools": json.dumps([TOOL])},
        {"conversations": [_SHARE_GPT[1], _CALL, {"from": "observation", "value": "w2a"}, _SHARE_GPT[2]], "tools": [TOOL]},
    ],
    "Alpaca": [
        {"instruction": "add", "input": "1 2", "output": "3", "system": "s", "history": [["a", "b"], ["c", "d"]]},
        {"instruction": "add", "output": "3", "text": None},
    ],
    "completion": [
        {"prompt": "one", "completion": " two"},
        {"prompt": turns("su"), "completion": [said("assistant", "w2a")], "tools": [TOOL]},
    ],
    "text": [{"text": "one two three"}],
    "ids": [
        {"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, 4], "attention_mask": [1, 1, 1, 0], "position_ids": [0, 1, 2, 3]}
    ],
}
# Values that JSON may hold and that Python's reader does not always take; they stand for an "x" of a row.
_EXTRAS = ("", "", "", "[" * 100_000 + "]" * 100_000, "[" * 500 + "]" * 500, "9" * 5000, '"' + "w " * 50_000 + '"', '"\\ud83d"')
_CASES = [(form, template) for form in ROWS for template in TEMPLATES]
_QUICK = list(zip(ROWS, ("chatml", "mistral", "qwen3.5", "gpt-oss", "llama3", "plain", "plain"), strict=True))


@pytest.mark.parametrize(("form", "template"), sampled(_CASES, _QUICK))
def test_a_mutated_row_is_taken_left_out_or_refused(form: str, template: str) -> None:
    @settings(max_examples=8 if (form, template) in _QUICK else 60, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(ROWS[form]).flatmap(mutated), st.sampled_from(_EXTRAS), st.sampled_from((0, 20)), st.booleans())
    def tried(row: Any, extra: str, before: int, contents: bool) -> None:
        good = [json.dumps(each) for each in ROWS[form]] * 20
        with tempfile.TemporaryDirectory() as folder:
            _read(Path(folder), [*good[:before], _line_of(row, extra), *good[before:20]], template, contents)

    tried()


def _line_of(row: Any, extra: str) -> str:
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(row).replace('"x"', extra or '"x"')
    finally:
        sys.set_int_max_str_digits(sys.int_info.default_max_str_digits)


def _read(folder: Path, lines: list[str], template: str, contents: bool) -> None:
    """Read a file whose lines are all right but one."""
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    spec = DataSpec(paths=(str(path),), sequence_length=64, tokens_per_step=64, contents=contents, template_date="2026-01-02")
    try:
        tokens = load_tokens(spec, tokenizer_of(TEMPLATES[template]), folder / "cache")
    except DataError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert all(len(each) < 1500 for each in tokens.notices)
        assert tokens.info.samples + tokens.info.dropped_samples + tokens.info.unmarked_samples == len(lines)
    assert not refusal or re.search(r"rows\.jsonl(, line \d|: )", refusal)
    assert len(refusal) < 1500, refusal
