"""Rows of preferences, with TRL's columns: each becomes two completions of one prompt, chosen and rejected.

Invariant: both are in the data, one after the other, or neither is.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

from headrace.data.read.sources import Source, read_with
from headrace.data.values.values import Encoded, Kind, Row, Unmarked
from headrace.terms.errors import DataError
from headrace.terms.options.preferences import PAIR, Preferences

_NOT_USED = "prompt, a text, is not used beside conversations: the prompt is what chosen and rejected both begin with"


def read_pairs(source: Source) -> tuple[Kind, Iterator[Row]]:
    """Return the rows of `source`, each as two with prompt and completion. Without a prompt, what both begin with is one. So it
    is where both are conversations and the prompt is a text.

    Raises:
        DataError: there are no rows, or a row lacks a column or says the same twice; rows are checked while they are read.
    """
    return Kind.COMPLETION, (each for row in read_with(source, Preferences.PAIRS) for each in _completions(row))


def _completions(row: Row) -> Iterator[Row]:
    values = row.values
    chosen, rejected, prompt = values["chosen"], values["rejected"], values.get("prompt")
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise DataError(f"{row.place}: chosen and rejected must both be texts, or both lists of messages. Correct the sample")
    if chosen == rejected:
        raise DataError(f"{row.place}: chosen and rejected are equal, which prefers nothing. Remove the sample")
    remarks: tuple[str, ...] = ()
    if isinstance(prompt, list) and isinstance(chosen, list):
        chosen, rejected = _without(row.place, prompt, chosen, rejected)
    elif prompt is None or (isinstance(prompt, str) and isinstance(chosen, list)):
        count = _shared(chosen, rejected)
        if not count and prompt is not None and _answers(chosen, rejected):
            prompt = [{"role": "user", "content": prompt}]
        else:
            remarks = () if prompt is None else (_NOT_USED,)
            prompt, chosen, rejected = chosen[:count], chosen[count:], rejected[count:]
        if not prompt and isinstance(chosen, list):
            raise DataError(
                f"{row.place}: chosen and rejected have no first message in common, so there is no prompt; give prompt as a "
                "list of messages, or let both begin with the same messages"
            )
    beside: Mapping[str, Any] = {name: value for name, value in values.items() if name not in (*PAIR, "prompt")}
    for completion in (chosen, rejected):
        yield replace(row, values={**beside, "prompt": prompt, "completion": completion}, remarks=(*row.remarks, *remarks))
        remarks = ()


def _without(place: str, prompt: list[Any], chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return both completions without the messages of the prompt, which some data repeat in them."""
    count = len(prompt)
    repeat = [completion[:count] == prompt for completion in (chosen, rejected)]
    if any(repeat) and not all(repeat):
        raise DataError(f"{place}: only one of chosen and rejected begins with the messages of prompt. Correct the sample")
    return (chosen[count:], rejected[count:]) if prompt and all(repeat) else (chosen, rejected)


def _answers(chosen: Any, rejected: Any) -> bool:
    """Return whether both are answers alone: they begin with a message of the assistant."""
    return all(isinstance(each, dict) and each.get("role") == "assistant" for each in (*chosen[:1], *rejected[:1]))


def _shared(chosen: Any, rejected: Any) -> int:
    """Return how much both begin with. A word of a text is not cut, and of messages each keeps one."""
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    if isinstance(chosen, str):
        return count - (chosen[count - 1 : count] == " ")
    return max(0, min(count, len(chosen) - 1, len(rejected) - 1))


def whole_pairs(samples: Iterable[Encoded | Unmarked], most_tokens: int) -> Iterator[Encoded | Unmarked]:
    """Yield samples, two and two, so that both are left out where one would be."""
    following = iter(samples)
    for pair in zip(following, following, strict=True):
        if unmarked := next((each for each in pair if isinstance(each, Unmarked)), None):
            yield from (unmarked, unmarked)
        elif all(isinstance(each, Encoded) and any(each.trained[1:most_tokens]) for each in pair):
            yield from _parted_alike([each for each in pair if isinstance(each, Encoded)])
        else:
            yield from (replace(each, trained=[False] * len(each.ids)) for each in pair if isinstance(each, Encoded))


def _parted_alike(pair: list[Encoded]) -> list[Encoded]:
    """Return both samples of a pair, trained from where the earlier one parts from the prompt."""
    parted = [each.parted for each in pair if each.parted is not None]
    if len(set(parted)) < 2:
        return pair
    start = min(parted)
    return [replace(each, trained=[False] * start + [True] * (len(each.ids) - start)) for each in pair]
