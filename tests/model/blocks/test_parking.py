"""A thread that parks in the midst of its code, and goes on when it is let.

Run: pytest tests/model/blocks/test_parking.py
"""

import threading

import pytest

from headrace.model.blocks.parking import ParkedThread


def test_one_of_the_two_runs_at_a_time() -> None:
    seen: list[str] = []

    def run() -> None:
        for name in ("a", "b"):
            seen.append(name)
            parked.park()
        seen.append("c")

    parked = ParkedThread(run, "test")
    for number in range(3):
        seen.append(str(number))
        parked.go_on()
    assert seen == ["0", "a", "1", "b", "2", "c"]


def test_what_its_code_raises_is_raised_where_it_was_let_go_on() -> None:
    parked = ParkedThread(lambda: {}["missing"], "test")
    with pytest.raises(KeyError, match="missing"):
        parked.go_on()
    parked.close()


@pytest.mark.parametrize("turns", [0, 1])
def test_closed_it_unwinds_from_where_it_is(turns: int) -> None:
    unwound = threading.Event()

    def run() -> None:
        try:
            parked.park()
        finally:
            unwound.set()

    parked = ParkedThread(run, "test")
    for _ in range(turns):
        parked.go_on()
    parked.close()
    assert unwound.is_set() is (turns > 0)
    assert all(thread.name != "test" for thread in threading.enumerate())
