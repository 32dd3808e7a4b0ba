"""Values come back from JSON as they were; what is no such value is refused."""

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.plan.value.stored import from_stored


class Kind(StrEnum):
    ONE = "one"
    TWO = "two"


class Cut(NamedTuple):
    start: int
    stop: int
    items: int = 0


@dataclass(frozen=True)
class Inner:
    kind: Kind
    cuts: tuple[Cut, ...] = ()
    pair: tuple[int, str] = (1, "a")


@dataclass(frozen=True)
class Outer:
    inner: Inner | None
    runs: tuple[tuple[int, float], ...]
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    small: bool = False


CUTS = st.builds(Cut, st.integers(), st.integers(), st.integers())
INNER = st.builds(Inner, st.sampled_from(Kind), st.lists(CUTS).map(tuple), st.tuples(st.integers(), st.text()))
RUNS = st.lists(st.tuples(st.integers(), st.floats(allow_nan=False))).map(tuple)
PEAKS = st.dictionaries(st.text(), st.dictionaries(st.text(), st.integers()))


@settings(max_examples=30)
@given(value=st.builds(Outer, st.none() | INNER, RUNS, PEAKS, st.booleans()))
def test_a_value_comes_back_from_json_as_it_was(value: Outer) -> None:
    assert from_stored(Outer, json.loads(json.dumps(asdict(value)))) == value


def test_absent_fields_have_their_defaults() -> None:
    stored = {"inner": {"kind": "two", "cuts": [[1, 2]]}, "runs": []}
    assert from_stored(Outer, stored) == Outer(Inner(Kind.TWO, (Cut(1, 2),)), ())


@pytest.mark.parametrize(
    "stored",
    [
        None,
        [],
        {"inner": None},
        {"inner": None, "runs": [], "speed": 1},
        {"inner": None, "runs": [[1]]},
        {"inner": None, "runs": [[1.5, 1.0]]},
        {"inner": None, "runs": [], "small": 1},
        {"inner": None, "runs": [], "peaks": {"host": {"all": "many"}}},
        {"inner": {"kind": "three"}, "runs": []},
        {"inner": {"kind": "one", "cuts": [{"start": 1}]}, "runs": []},
    ],
)
def test_what_is_no_such_value_is_refused(stored: Any) -> None:
    with pytest.raises((TypeError, KeyError, ValueError, AttributeError)):
        from_stored(Outer, stored)
