"""What data are read as for a loss of the whole step, and without one; and which of their samples come two and two."""

from collections.abc import Iterable, Iterator

from headrace.data.pairs.labelled import read_labelled, with_others
from headrace.data.pairs.pairs import read_pairs, whole_pairs
from headrace.data.read.sources import Source, read_rows, read_with
from headrace.data.values.values import DataSpec, Encoded, Kind, Row, Unmarked
from headrace.terms.options.preferences import Preferences


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
