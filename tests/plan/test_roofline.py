"""Rooflines: two forms of one law, its turning points, and the planner's use of it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan.machine_profiles import load_profile
from headrace.plan.rates import Rates
from headrace.plan.roofline import attainable, intensity, roofline_seconds, stays_where_data_lie
from headrace.terms.lanes import Lane
from headrace.terms.program import Op, Verb

positive = st.floats(1e3, 1e15)


@given(flops=positive, peak=positive, moved=st.lists(st.tuples(positive, positive), max_size=3))
def test_seconds_are_operations_over_what_is_attained(flops: float, peak: float, moved: list[tuple[float, float]]):
    roofs = [(bandwidth, intensity(flops, num_bytes)) for num_bytes, bandwidth in moved]
    assert roofline_seconds(flops, peak, *moved) == pytest.approx(flops / attainable(peak, *roofs))


@given(peak=positive, bandwidth=positive, link=positive, here=positive, far=positive)
def test_data_elsewhere_attain_no_more_than_any_roof(peak: float, bandwidth: float, link: float, here: float, far: float):
    remote = attainable(peak, (bandwidth, here), (link, far))
    assert remote <= attainable(peak, (bandwidth, here))
    assert remote <= min(peak, bandwidth * here, link * far)


def test_at_the_first_turning_point_both_places_attain_the_same():
    # The host: 1.6 T operations per second, 76 GB/s; the device, 16 GB/s away: 104 T, 285 GB/s.
    there = attainable(1.6e12, (76e9, 4.0))
    turning = there / 16e9
    assert attainable(104e12, (285e9, 1e6), (16e9, turning)) == pytest.approx(there)
    assert stays_where_data_lie(there, 16e9, 0.99 * turning)
    assert not stays_where_data_lie(there, 16e9, 1.01 * turning)


def test_beyond_the_balance_point_more_rows_do_not_help():
    device, link, here = 285e9, 16e9, 8.0
    balance = device * here / link  # the far intensity at which both roofs are level
    assert attainable(104e12, (device, here), (link, balance)) == pytest.approx(device * here)
    assert attainable(104e12, (device, here), (link, 10 * balance)) == pytest.approx(device * here)


def test_nothing_touched_takes_the_peaks_time():
    assert intensity(1.0, 0.0) == math.inf
    assert roofline_seconds(6.0, 3.0) == 2.0
    assert roofline_seconds(0.0, 3.0, (8.0, 2.0)) == 4.0


def test_the_clock_takes_compute_from_the_roofline():
    machine = load_profile("t4-1ssd")
    rates = Rates(machine, "float16", None, None)
    for flops, num_bytes in ((1e12, 10**6), (1e9, 10**10)):
        op = Op(index=0, verb=Verb.FORWARD, lane=Lane.COMPUTE, flops=flops, bytes=num_bytes)
        memory = machine.device_memory_bytes_per_second
        assert memory is not None
        expected = roofline_seconds(flops, machine.flops_per_second["float16"], (num_bytes, memory))
        assert rates.alone_seconds(op) == machine.launch_seconds + expected
