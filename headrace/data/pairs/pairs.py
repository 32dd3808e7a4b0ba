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
from headrace.terms.options.preferences import PAIR


def read_pairs(source: Source) -> tuple[Kind, Iterator[Row]]:
    """Return the rows of `source`, each as two with prompt and completion. Without a prompt, what both begin with is one.

    Raises:
        DataError: there are no rows, or a row lacks a column or says the same twice; rows are checked while they are read.
    """
    rows = read_with(source, PAIR, "preferences are read with the columns chosen + rejected, and prompt if there is one")
    return Kind.COMPLETION, (each for row in rows for each in _completions(row))


def _completions(row: Row) -> Iterator[Row]:
    values = row.values
    chosen, rejected, prompt = values["chosen"], values["rejected"], values.get("prompt")
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise DataError(f"{row.place}: chosen and rejected must both be texts, or both lists of messages. Correct the sample")
    if chosen == rejected:
        raise DataError(f"{row.place}: chosen and rejected are equal, which prefers nothing. Remove the sample")
    if prompt is None:
        count = _shared(chosen, rejected)
        prompt, chosen, rejected = chosen[:count], chosen[count:], rejected[count:]
    elif isinstance(prompt, list) and isinstance(chosen, list) and chosen[: len(prompt)] == prompt:
        # Some data repeat the prompt's messages in both.
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    elif isinstance(prompt, str) and isinstance(chosen, list):
        prompt = [{"role": "user", "content": prompt}]
        if chosen[:1] == prompt:
            chosen, rejected = chosen[1:], rejected[1:]
    beside: Mapping[str, Any] = {name: value for name, value in values.items() if name not in (*PAIR, "prompt")}
    for completion in (chosen, rejected):
        yield replace(row, values={**beside, "prompt": prompt, "completion": completion})


def _shared(chosen: Any, rejected: Any) -> int:
    """Return how much both begin with. A word of a text is not cut."""
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    return count - (isinstance(chosen, str) and chosen[count - 1 : count] == " ")


def whole_pairs(samples: Iterable[Encoded | Unmarked], most_tokens: int) -> Iterator[Encoded | Unmarked]:
    """Yield samples, two and two, so that both are left out where one would be."""
    following = iter(samples)
    for pair in zip(following, following, strict=True):
        if unmarked := next((each for each in pair if isinstance(each, Unmarked)), None):
            yield from (unmarked, unmarked)
        elif all(isinstance(each, Encoded) and any(each.trained[1:most_tokens]) for each in pair):
            yield from pair
        else:
            yield from (replace(each, trained=[False] * len(each.ids)) for each in pair if isinstance(each, Encoded))
