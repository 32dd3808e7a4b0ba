"""What data are read as for a loss of the whole step, and without one; and which of their samples come two and two.

With TRL's columns: a row of preferences becomes two completions of one prompt, chosen and rejected. A labelled row becomes two:
it, and its prompt with another's completion. As in TRL, completions move on by one within a step's share of the data, so each
of them occurs in both roles.
Invariant: both of two are in the data, one after the other, or neither is.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, takewhile
from typing import Any

from headrace.data.read.sources import Source, read_rows, read_with
from headrace.data.values.values import DataSpec, Encoded, Kind, Row, Unmarked
from headrace.terms.errors import DataError, shortened
from headrace.terms.options.preferences import PAIR, Preferences

_NOT_USED = "prompt, a text, is not used beside conversations: the prompt is what chosen and rejected both begin with"
_PAIRS_AT_ONCE = 1000


def read(source: Source, preferences: Preferences | None) -> tuple[Kind, Iterator[Row]]:
    """Return the kind and the rows of `source`; `preferences` says what a loss of the whole step reads, None if there is none.

    Raises:
        DataError: see `read_rows`, `read_pairs` and `read_labelled`.
    """
    match preferences:
        case Preferences.PAIRS:
            return read_pairs(source)
        case Preferences.LABELS:
            return read_labelled(source)
        case Preferences.PROMPTS:
            return Kind.COMPLETION, read_with(source, preferences)
        case None:
            return read_rows(source)


def two_and_two(samples: Iterable[Encoded | Unmarked], spec: DataSpec) -> Iterable[Encoded | Unmarked]:
    """Return samples as a loss takes them: see `whole_pairs` and `with_others`; as they are, if there is none."""
    match spec.preferences:
        case Preferences.PAIRS:
            return whole_pairs(samples, spec.sequence_length)
        case Preferences.LABELS:
            return with_others(samples, spec.sequence_length, spec.rows_per_step // 2)
        case Preferences.PROMPTS | None:
            return samples


def is_conversation(kind: Kind, row: Row, preferences: Preferences | None) -> bool:
    """Return whether a row is a conversation, or a prompt that asks for one."""
    answered = "prompt" if preferences is Preferences.PROMPTS else "completion"
    return kind is Kind.CHAT or (kind is Kind.COMPLETION and isinstance(row.values[answered], list))


def columns_read(kind: Kind, preferences: Preferences | None) -> str:
    """Return the columns of samples, for people."""
    return " + ".join(preferences.columns if preferences else kind.columns)


def words_in_key(spec: DataSpec) -> str:
    """Return what of `spec.preferences` decides samples, for the name of their cache."""
    match spec.preferences:
        case Preferences.PAIRS:
            return " pairs"
        case Preferences.LABELS:
            return f" labels {spec.rows_per_step // 2}"
        case Preferences.PROMPTS | None:
            return ""


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


def read_labelled(source: Source) -> tuple[Kind, Iterator[Row]]:
    """Return the rows of `source`. Of pairs, what was chosen is desirable, and what was rejected is not.

    Raises:
        DataError: there are no rows, or a row lacks a column or has no label; rows are checked while they are read.
    """
    if all(next(source.read(), Row("", {})).values.get(column) is not None for column in PAIR):
        kind, rows = read_pairs(source)
        return kind, _one_by_one(rows)
    return Kind.COMPLETION, (replace(row, desirable=_label(row)) for row in read_with(source, Preferences.LABELS))


def _one_by_one(rows: Iterator[Row]) -> Iterator[Row]:
    """Yield some chosen rows, then their rejected ones, so that no neighbours have one prompt."""
    while some := list(islice(rows, 2 * _PAIRS_AT_ONCE)):
        yield from (replace(row, desirable=number == 0) for number in (0, 1) for row in some[number::2])


def _label(row: Row) -> bool:
    found = row.values["label"]
    if found not in (0, 1):
        raise DataError(f"{row.place}: label must be true or false, found {shortened(repr(found), 60)}. Correct the sample")
    return bool(found)


def with_others(samples: Iterable[Encoded | Unmarked], most_tokens: int, count: int) -> Iterator[Encoded | Unmarked]:
    """Yield each sample, then its prompt with the completion before it; the first of `count` gets that of the last one.

    Left out are samples without a prompt, or without a completion that fits into `most_tokens`.
    """
    group: list[Encoded] = []
    for sample in samples:
        if isinstance(sample, Unmarked):
            yield from (sample, sample)
        elif sample.trained[0] or not any(sample.trained[:most_tokens]):
            yield from [replace(sample, trained=[False] * len(sample.ids))] * 2
        else:
            group.append(sample)
        if len(group) == count:
            yield from _mixed(group)
            group = []
    yield from _mixed(group)


def _mixed(group: list[Encoded]) -> Iterator[Encoded]:
    for sample, other in zip(group, [*group[-1:], *group[:-1]], strict=True):
        start, from_there = sample.trained.index(True), other.trained.index(True)
        ids, trained = sample.ids[:start] + other.ids[from_there:], sample.trained[:start] + other.trained[from_there:]
        yield sample
        yield Encoded(ids, trained, other.beyond, desirable=sample.desirable)
