"""Bytes written become terabytes, a share of the rating, and hours, for the drive that wears out first."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan.clock.endurance import endurance
from headrace.terms.machine.drives import Drive


def drive(mixed: float = 6e9, rated: float | None = 1e15, capacity: int = 10**12, write: float = 3e9) -> Drive:
    return Drive(
        read_bytes_per_second=6e9,
        write_bytes_per_second=write,
        mixed_bytes_per_second=mixed,
        capacity_bytes=capacity,
        rated_endurance_bytes=rated,
    )


def test_one_drive():
    forecast = endurance([drive()], 2e12, num_steps=50, step_seconds=72)
    assert forecast.written_terabytes == 100
    assert forecast.share_of_rating == pytest.approx(0.1)
    assert forecast.run_hours == 1
    assert forecast.steps_in_rating == pytest.approx(500)
    assert forecast.explain() == (
        "1 h 00 min for 50 steps; 100 TB written, 10.0% of the endurance of SSD 0 (1000 TB, rated), "
        "which lasts for 500 such steps"
    )


def test_the_drive_that_wears_out_first_is_reported():
    # Twice the bandwidth gets twice the bytes: 40 of 60 TB, of a rating that is twice as large; the small one gets 20 of 100.
    forecast = endurance([drive(2e9, 2e14), drive(1e9, 0.5e14)], 60e12, num_steps=1, step_seconds=1)
    assert forecast.drive == 1
    assert forecast.share_of_rating == pytest.approx(20 / 50)


def test_what_a_drive_gets_goes_by_what_the_stripes_go_by():
    """A drive that writes slowly gets no less for it, if reading and writing at once it is as fast as the other."""
    forecast = endurance([drive(write=1e9), drive(write=3e9, rated=2e15)], 1e12, num_steps=1, step_seconds=1)
    assert forecast.drive == 0
    assert forecast.drive_written_bytes == pytest.approx(0.5e12)


def test_a_typical_rating_is_taken_and_said_where_none_is_known():
    forecast = endurance([drive(rated=None)], 6e12, num_steps=1, step_seconds=1)
    assert forecast.share_of_rating == pytest.approx(0.01)
    assert "typical of its size" in forecast.explain()


def test_a_run_that_writes_nothing_wears_nothing():
    forecast = endurance([drive()], 0, num_steps=10, step_seconds=1)
    assert forecast.share_of_rating == 0
    assert forecast.steps_in_rating == math.inf
    assert "nothing is written" in forecast.explain()


@given(st.lists(st.floats(1e8, 1e10), min_size=1, max_size=12), st.integers(1, 10**6))
def test_equal_drives_share_the_wear_by_bandwidth(rates: list[float], num_steps: int):
    forecast = endurance([drive(rate) for rate in rates], 1e12, num_steps=num_steps, step_seconds=1)
    assert rates[forecast.drive] == pytest.approx(max(rates))
    assert forecast.drive_written_bytes == pytest.approx(1e12 * num_steps * max(rates) / sum(rates))
    assert forecast.share_of_rating * forecast.steps_in_rating == pytest.approx(num_steps)


@pytest.mark.parametrize(
    ("drives", "written", "steps", "seconds"),
    [
        ([], 1.0, 1, 1.0),
        ([drive()], 1.0, 0, 1.0),
        ([drive()], -1.0, 1, 1.0),
        ([drive()], math.nan, 1, 1.0),
        ([drive()], 1.0, 1, -1.0),
    ],
)
def test_nonsense_is_refused(drives: list[Drive], written: float, steps: int, seconds: float):
    with pytest.raises(ValueError, match="endurance"):
        endurance(drives, written, num_steps=steps, step_seconds=seconds)
