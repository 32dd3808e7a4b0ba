"""The least time for the lanes' work is what brute force finds, and what two and three lanes need by hand."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.plan.clock.bound import least_seconds
from headrace.terms.lanes import Lane

FOUR = (Lane.COMPUTE, Lane.SSD_READ, Lane.SSD_WRITE, Lane.UPDATE)


def speeds_of(kept: dict[tuple[Lane, Lane], float]):
    """Return speeds of lanes that each keep the product of their shares beside the others."""

    def speeds(active: tuple[Lane, ...]) -> dict[Lane, float]:
        return {
            lane: float(np.prod([kept.get((lane, other), 1.0) for other in active if other is not lane])) for lane in active
        }

    return speeds


def by_enumeration(alone: dict[Lane, float], speeds) -> float:
    """Try all corners of the prices at which no set of lanes earns more than a second in a second; the dearest work wins."""
    lanes = list(alone)
    rows = []
    for chosen in range(1, 1 << len(lanes)):
        names = [lane for bit, lane in enumerate(lanes) if chosen >> bit & 1]
        speed = speeds(tuple(names))
        rows.append([speed.get(lane, 0.0) for lane in lanes])
    matrix = np.array([*rows, *-np.eye(len(lanes))])
    limits = np.array([1.0] * len(rows) + [0.0] * len(lanes))
    picks = np.array(list(combinations(range(len(matrix)), len(lanes))))
    regular = np.abs(np.linalg.det(matrix[picks])) > 1e-9
    corners = np.linalg.solve(matrix[picks][regular], limits[picks][regular][..., None])[..., 0]
    allowed = corners[(corners @ matrix.T <= limits + 1e-7).all(axis=1)]
    return float((allowed @ np.array([alone[lane] for lane in lanes])).max())


@settings(max_examples=60, deadline=None)
@given(
    seconds=st.lists(st.floats(0.01, 10.0), min_size=4, max_size=4),
    kept=st.lists(st.floats(0.05, 1.0), min_size=12, max_size=12),
)
def test_is_what_brute_force_finds(seconds: list[float], kept: list[float]) -> None:
    pairs = [(one, other) for one in FOUR for other in FOUR if one is not other]
    speeds = speeds_of(dict(zip(pairs, kept, strict=True)))
    alone = dict(zip(FOUR, seconds, strict=True))
    found = least_seconds(alone, speeds)
    assert found == pytest.approx(by_enumeration(alone, speeds), rel=1e-6)
    assert max(seconds) * (1 - 1e-9) <= found <= sum(seconds) * (1 + 1e-9)


def test_lanes_that_do_not_disturb_one_another_take_as_long_as_the_longest() -> None:
    assert least_seconds(dict(zip(FOUR, (1.0, 4.0, 3.0, 2.0), strict=True)), speeds_of({})) == pytest.approx(4.0)


def test_three_lanes_on_one_drive_and_two_cores_take_longer_than_any_two_of_them() -> None:
    halves = {(one, other): 0.5 for one in FOUR[:3] for other in FOUR[:3] if one is not other}
    alone = dict.fromkeys(FOUR[:3], 1.0)
    assert least_seconds(dict.fromkeys(FOUR[:2], 1.0), speeds_of(halves)) == pytest.approx(2.0)
    assert least_seconds(alone, speeds_of(halves)) == pytest.approx(3.0)  # all at once do three quarters of a second's work


def test_a_pair_that_is_slower_than_one_after_the_other_goes_one_after_the_other() -> None:
    drives = {(Lane.SSD_READ, Lane.SSD_WRITE): 0.3, (Lane.SSD_WRITE, Lane.SSD_READ): 0.5}
    assert least_seconds({Lane.SSD_READ: 2.0, Lane.SSD_WRITE: 1.0}, speeds_of(drives)) == pytest.approx(3.0)


def test_no_work_takes_no_time() -> None:
    assert least_seconds({}, speeds_of({})) == least_seconds({Lane.UPDATE: 0.0}, speeds_of({})) == 0.0
