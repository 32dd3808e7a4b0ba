"""A mutant changes a function for all who have it, and one that is stale says so. Run: pytest tests/mutants"""

import importlib
import sys
from pathlib import Path

import pytest
from mutant import Mutant

MADE = """from functools import cache


class Counter:
    def __init__(self):
        self.count = 0

    @property
    def next(self):
        self.count += 1
        return self.count


@cache
def half(number):
    return number // 2
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    (tmp_path / "made_to_change.py").write_text(MADE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("made_to_change")
    del sys.modules["made_to_change"]


def test_methods_properties_and_cached_functions_change_where_they_are_known(made: object) -> None:
    counter, half = made.Counter(), made.half
    Mutant("made_to_change:Counter.next", "self.count += 1", "self.count += 3").apply()
    Mutant("made_to_change:half", "return number // 2", "return number * 2").apply()
    assert (counter.next, counter.next, half(7)) == (3, 6, 14)


def test_what_is_not_there_any_more_is_stale(made: object) -> None:
    for stale in (
        Mutant("made_to_change:half", "return number / 2", "return 0"),
        Mutant("made_to_change:gone", "return 0", "return 1"),
        Mutant("made_to_change:half", "return number // 2", "return 0", nth=1),
    ):
        with pytest.raises((LookupError, AttributeError)):
            stale.apply()
    assert made.half(8) == 4
