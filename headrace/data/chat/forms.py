"""Other forms of conversations: rows of ShareGPT and Alpaca become rows with `messages`.

Invariant: texts do not change: every text of the row is in its messages, in its order, or the row is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.data.values.messages import MEDIA_COLUMNS, read_json
from headrace.data.values.values import Kind, Row
from headrace.terms.errors import DataError
from headrace.terms.options.preferences import READ_FOR_LOSSES

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_call": "assistant",
    "function_response": "tool",
}


@dataclass(frozen=True, slots=True)
class RowForm:
    """The `columns` that every row of this form has, its name, and the function that turns a row into one with `messages`."""

    name: str
    columns: tuple[str, ...]
    renamed: Callable[[Row], Row]


def _share_gpt(row: Row) -> Row:
    turns = row.values["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise DataError(f"{row.place}: conversations must be a list of objects with from and value, found {str(turns)[:60]!r}")
    return _with_messages(row, [_message(row, index, turn) for index, turn in enumerate(turns)])


def _message(row: Row, index: int, turn: Mapping[str, Any]) -> Mapping[str, Any]:
    if turn.get("from") is None and turn.get("role") is not None:
        return turn  # as messages have it
    speaker = turn.get("from")
    role = _ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None or turn.get("value") is None:
        raise DataError(
            f"{row.place}: conversations[{index}] must have a value, and say in from who speaks ({', '.join(_ROLES)}), found "
            f"{str(turn)[:80]!r}. Correct the sample"
        )
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    if speaker == "function_call":  # LLaMA-Factory: the call, or several, as JSON
        return {
            **others,
            "role": role,
            "content": "",
            "tool_calls": _calls(f"{row.place}: conversations[{index}]", turn["value"]),
        }
    return {**others, "role": role, "content": turn["value"]}


def _calls(where: str, value: Any) -> list[Mapping[str, Any]]:
    found = read_json(f"{where}, a function_call,", value)
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise DataError(
            f'{where}: a function_call must be {{"name": ..., "arguments": ...}} or a list of these, found '
            f"{str(value)[:60]!r}. Correct the sample"
        )
    return [{"type": "function", "function": {"arguments": {}, **call}} for call in calls]


def _alpaca(row: Row) -> Row:
    turns: list[Mapping[str, Any]] = []
    history = row.values.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise DataError(f"{row.place}: history must be a list of pairs of texts, found {str(history)[:60]!r}")
    for question, answer in history:
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    asked = [row.values[name] for name in ("instruction", "input") if row.values.get(name)]
    wrong = next((value for value in (*asked, row.values["output"]) if not isinstance(value, str)), None)
    if wrong is not None:
        raise DataError(f"{row.place}: instruction, input and output must be strings, found {str(wrong)[:60]!r}")
    turns += [{"role": "user", "content": "\n\n".join(asked)}, {"role": "assistant", "content": row.values["output"]}]
    return _with_messages(row, turns)


def _with_messages(row: Row, turns: list[Mapping[str, Any]]) -> Row:
    system = row.values.get("system")
    first: list[Mapping[str, Any]] = [{"role": "system", "content": system}] if system else []
    beside = {name: row.values[name] for name in ("tools", *MEDIA_COLUMNS) if name in row.values}
    return replace(row, values={**beside, "messages": first + turns})


FORMS = (
    RowForm("ShareGPT", ("conversations",), _share_gpt),
    RowForm("Alpaca", ("instruction", "output"), _alpaca),
)
# What says in TRL's data which of `input_ids` are trained.
MASKS = ("completion_mask", "assistant_masks")
# Columns whose values are objects, or may be.
CONVERSATIONS = frozenset({"messages", "prompt", "completion", "chosen", "rejected", "conversations", "tools"})
# All columns that are looked at, whatever the form of a row.
READ = frozenset(
    {
        *(column for form in (*Kind, *FORMS) for column in form.columns),
        *READ_FOR_LOSSES,
        *(
            "labels",
            "attention_mask",
            "position_ids",
            "seq_lengths",
            "tools",
            "input",
            "history",
            "system",
            *MASKS,
            *MEDIA_COLUMNS,
        ),
    }
)
