"""Stages in a row on a virtual clock: what arrives first runs, and links carry what they can."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.peers.stages.cuts import even_cuts
from headrace.peers.stages.pipeline import Station, most_busy_share, run
from headrace.terms.errors import ConfigError


def alike(count: int, onward: float = 1.0, back: float = 3.0) -> list[Station]:
    """Return stages that take equally long; the last one's forward and backward are one piece of work."""
    return [Station(onward=onward, back=back, in_flight=2 * (count - stage) - 1) for stage in range(count)]


@given(st.integers(1, 5), st.integers(1, 12))
def test_stages_alike_with_links_that_take_no_time_fill_and_drain_once(count: int, groups: int) -> None:
    found = run(alike(count), [0.0] * (count - 1), groups)
    assert found.step_seconds == pytest.approx((groups + count - 1) * 4.0)
    assert found.busy_shares == pytest.approx([groups / (groups + count - 1)] * count)


def test_two_stages_and_a_link_as_drawn_by_hand() -> None:
    # Onward 1, the last one's 4, back 3, each way 2: 0-1 | 1-3 | 3-7 | 7-9 | 9-12, and the second group right behind the first.
    found = run(alike(2), [2.0], 2)
    assert found.step_seconds == 3 + 4 + 4 + 2 + 3


@given(
    st.lists(st.tuples(st.floats(0.1, 4), st.floats(0.1, 4)), min_size=2, max_size=4),
    st.floats(0.0, 2.0),
    st.integers(1, 10),
)
def test_no_step_is_shorter_than_its_slowest_part_and_the_way_there_and_back(
    times: list[tuple[float, float]], transfer: float, groups: int
) -> None:
    stations = [Station(onward=on, back=back, in_flight=2 * (len(times) - at) - 1) for at, (on, back) in enumerate(times)]
    found = run(stations, [transfer] * (len(times) - 1), groups)
    through = sum(on + back for on, back in times) + 2 * transfer * (len(times) - 1)
    assert found.step_seconds >= max(through, *(groups * (on + back) for on, back in times)) - 1e-9
    assert found.step_seconds <= groups * through + 1e-9
    assert max(found.busy_shares) <= most_busy_share([on + back for on, back in times], transfer, groups) + 1e-9


def test_the_bound_of_stages_that_are_alike_is_that_of_the_paper() -> None:
    for groups, count, seconds, transfer in ((1, 2, 3.0, 0.5), (8, 4, 1.0, 2.0)):
        busy = groups * seconds
        expected = busy / (busy + (count - 1) * (seconds + 2 * transfer))
        assert most_busy_share([seconds] * count, transfer, groups) == pytest.approx(expected)


def test_links_that_take_half_a_groups_time_are_hidden() -> None:
    groups, count = 32, 3
    found = run(alike(count), [2.0] * (count - 1), groups)
    assert found.busy_shares[0] >= 0.9 * most_busy_share([4.0] * count, 2.0, groups)


def test_cuts_give_the_slowest_stage_least() -> None:
    assert even_cuts([1, 1, 1, 5], 2) == (3,)
    assert even_cuts([2, 1, 1, 1, 1], 3) == (1, 3)
    with pytest.raises(ConfigError, match="name fewer"):
        even_cuts([1.0], 2)


def test_cuts_follow_speeds() -> None:
    assert even_cuts([1.0] * 6, 2, (2.0, 1.0)) == (4,)
