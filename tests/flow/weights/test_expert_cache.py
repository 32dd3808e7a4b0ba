"""The hottest experts stay in memory: as many as there are places, chosen by tokens, and not moved in between."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.flow.weights.expert_cache import ExpertCache

PASSES = st.lists(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), max_size=8), min_size=1, max_size=17)


def bring(cache: ExpertCache, expert: tuple[int, int]) -> bool:
    """Ask for an expert as a pass does; return whether it had to be read."""
    cache.tokens[expert] += 1
    place = cache.find(expert)
    if place is not None:
        assert (place == 10 * expert[0] + expert[1]).all(), "nothing else was put there"
        return False
    place = cache.admit(expert)
    if place is not None:
        assert cache.find(expert) is None, "until it has arrived, nobody finds it"
        assert cache.admit(expert) is None, "nor reads it to the same place"
        place[:] = 10 * expert[0] + expert[1]
        cache.arrived([expert])
    return True


@settings(max_examples=60)
@given(PASSES, st.integers(0, 6))
def test_what_is_there_is_what_was_put_there_and_the_hottest_once_chosen(
    passes: list[list[tuple[int, int]]], places: int
) -> None:
    cache = ExpertCache([np.zeros(4, np.uint8) for _ in range(places)])
    for number, wanted in enumerate(passes, start=1):
        before = cache.held
        for expert in dict.fromkeys(wanted):
            bring(cache, expert)
        assert before <= cache.held, "within a pass nothing is put out"
        assert len(cache.held) <= places
        cache.after_pass()
        if places and number in (1, 2, 4, 8, 16):
            counts = sorted(cache.tokens.values(), reverse=True)
            least = counts[places - 1] if len(counts) >= places else 0
            assert all(cache.tokens[each] >= least for each in cache.held), "none that others are hotter than"


def test_a_hot_expert_takes_the_place_of_a_cold_one_and_is_read_once_for_that() -> None:
    cache = ExpertCache([np.zeros(4, np.uint8)])
    assert bring(cache, (1, 0)), "the first that comes stays"
    for _ in range(3):
        bring(cache, (1, 1))
    cache.after_pass()
    assert cache.held == frozenset(), "the cold one has gone; nothing is read for the cache alone"
    assert bring(cache, (1, 1))
    assert not bring(cache, (1, 1)), "the hot one stays"
    for _ in range(9):
        bring(cache, (1, 0))
    cache.after_pass()  # the second choice
    assert cache.admit((1, 0)) is not None
    cache.after_pass()  # no choice after the third pass
    assert cache.held == frozenset({(1, 0)})


def test_experts_that_are_new_between_two_choices_stay_where_no_chosen_one_wants_the_place() -> None:
    cache = ExpertCache([np.zeros(4, np.uint8) for _ in range(3)])
    for expert in ((1, 0), (1, 1)):
        bring(cache, expert)
    cache.after_pass()
    cache.after_pass()
    bring(cache, (1, 2))  # the next choice is after the fourth pass
    assert cache.held == frozenset({(1, 0), (1, 1), (1, 2)})
    assert not bring(cache, (1, 2))


def test_a_new_expert_does_not_take_the_place_that_a_chosen_one_still_wants() -> None:
    cache = ExpertCache([np.zeros(4, np.uint8) for _ in range(2)])
    for expert in ((1, 0), (1, 1), (1, 2), (1, 2)):  # the last finds no place, though it is the hottest
        bring(cache, expert)
    cache.after_pass()
    assert cache.held == frozenset({(1, 0)})
    assert cache.admit((1, 3)) is None
    assert cache.admit((1, 2)) is not None
