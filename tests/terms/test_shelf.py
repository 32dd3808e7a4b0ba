"""A part that is held never leaves its slot, no slot has two parts, and each policy keeps what it says."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.terms.shelf import POLICIES, MostWanted, Part, Shelf

PARTS = [Part(unit, ((number, number + 1),)) for unit in (1, 2) for number in range(3)]
PASSES = st.lists(st.lists(st.sampled_from(PARTS), max_size=8), min_size=1, max_size=17)
ACTS = st.lists(st.tuples(st.sampled_from(["hold", "release", "want", "pass"]), st.sampled_from(PARTS)), max_size=60)


@settings(max_examples=100)
@given(st.sampled_from(sorted(POLICIES)), st.integers(0, 4), ACTS)
def test_what_is_held_stays_in_its_slot_and_no_slot_has_two_parts(
    policy: str, num_slots: int, acts: list[tuple[str, Part]]
) -> None:
    """Against slots that are written: what a held slot has is what was brought there last, for that part."""
    shelf = Shelf(num_slots, policy)
    memory: dict[int, Part] = {}
    held: Counter[Part] = Counter()
    slots: dict[Part, int] = {}
    for act, part in acts:
        if act == "hold":
            place = shelf.hold(part)
            if place is not None:
                assert 0 <= place.slot < num_slots
                if not place.is_there:
                    assert not held[part]
                    assert shelf.hold(part) is None, "until it has arrived, nobody finds it"
                    memory[place.slot] = part
                    shelf.arrived([part])
                assert memory[place.slot] == part
                assert not held[part] or slots[part] == place.slot
                held[part] += 1
                slots[part] = place.slot
        elif act == "release" and held[part]:
            shelf.release([part])
            held[part] -= 1
        elif act == "want":
            shelf.want(part, 2)
        elif act == "pass":
            shelf.after_pass()
        assert set(+held) <= shelf.parts
        assert len(shelf.parts) <= num_slots
        assert all(memory[slots[each]] == each for each in +held)


def use(shelf: Shelf, part: Part) -> bool:
    """Use a part for a moment; return whether it had to be brought."""
    shelf.want(part, 1)
    place = shelf.hold(part)
    if place is None:
        return True
    shelf.arrived([part])
    shelf.release([part])
    return not place.is_there


@settings(max_examples=50)
@given(st.integers(1, 4), st.lists(st.sampled_from(PARTS), max_size=40))
def test_those_used_last_are_there(num_slots: int, uses: Sequence[Part]) -> None:
    shelf, recent = Shelf(num_slots, "last-used"), list[Part]()
    for part in uses:
        assert use(shelf, part) == (part not in recent)
        recent = [*(each for each in recent if each != part), part][-num_slots:]
        assert shelf.parts == set(recent)


@given(st.integers(0, 4), st.lists(st.sampled_from(PARTS), max_size=40))
def test_those_that_come_first_are_kept(num_slots: int, uses: Sequence[Part]) -> None:
    shelf = Shelf(num_slots, "keep-all")
    for part in uses:
        use(shelf, part)
    assert shelf.parts == set(list(dict.fromkeys(uses))[:num_slots])


@settings(max_examples=60)
@given(PASSES, st.integers(0, 6))
def test_within_a_pass_nothing_leaves_and_the_most_wanted_stay_once_chosen(passes: list[list[Part]], num_slots: int) -> None:
    shelf = Shelf(num_slots, "most-wanted")
    policy = shelf.policy
    assert isinstance(policy, MostWanted)
    for number, wanted in enumerate(passes, start=1):
        before = shelf.parts
        for part in dict.fromkeys(wanted):
            assert part in before or use(shelf, part)
        assert before <= shelf.parts
        shelf.after_pass()
        if num_slots and number in (1, 2, 4, 8, 16):
            counts = sorted(policy.times.values(), reverse=True)
            least = counts[num_slots - 1] if len(counts) >= num_slots else 0
            assert all(policy.times[each] >= least for each in shelf.parts), "none that others were wanted more than"


def test_a_wanted_part_takes_the_slot_of_another_and_is_brought_once_for_that() -> None:
    cold, hot = PARTS[:2]
    shelf = Shelf(1, "most-wanted")
    assert use(shelf, cold), "the first that comes stays"
    for _ in range(3):
        assert use(shelf, hot)
    shelf.after_pass()
    assert shelf.parts == frozenset(), "the other has gone; nothing is brought for the shelf alone"
    assert use(shelf, hot)
    assert not use(shelf, hot), "it stays"
    for _ in range(9):
        use(shelf, cold)
    shelf.after_pass()  # the second choice
    use(shelf, cold)
    shelf.after_pass()  # no choice after the third pass
    assert shelf.parts == {cold}


def test_a_new_part_stays_between_two_choices_where_no_chosen_one_wants_the_slot() -> None:
    one, two, three, four = PARTS[:4]
    roomy = Shelf(3, "most-wanted")
    for part in (one, two):
        use(roomy, part)
    roomy.after_pass()
    roomy.after_pass()
    use(roomy, three)  # the next choice is after the fourth pass
    assert roomy.parts == {one, two, three}
    tight = Shelf(2, "most-wanted")
    for part in (one, two, three, three):  # the last finds no slot, though it is wanted most
        use(tight, part)
    tight.after_pass()
    assert tight.parts == {one}
    assert tight.hold(four) is None
    assert tight.hold(three) is not None


def test_a_held_part_that_is_to_leave_does_so_as_soon_as_it_is_released() -> None:
    cold, hot = PARTS[:2]
    shelf = Shelf(1, "most-wanted")
    assert shelf.hold(cold) is not None
    shelf.arrived([cold])
    shelf.want(hot, 1)
    shelf.after_pass()
    assert shelf.parts == {cold}, "somebody reads it"
    assert shelf.hold(hot) is None
    shelf.release([cold])
    assert shelf.parts == frozenset()
    assert use(shelf, hot)
    assert shelf.parts == {hot}


def test_all_is_forgotten_where_nothing_is_held() -> None:
    shelf = Shelf(1, "last-used")
    use(shelf, PARTS[0])
    shelf.clear()
    assert shelf.hold(PARTS[0]) == (0, False)
    shelf.arrived(PARTS[:1])
    with pytest.raises(AssertionError, match="held"):
        shelf.clear()
