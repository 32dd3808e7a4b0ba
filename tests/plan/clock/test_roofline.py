"""Rooflines: two forms of one law, and the planner's use of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan.clock.machine_profiles import load_profile
from headrace.plan.clock.rates import Rates, roofline_seconds
from headrace.terms.lanes import Lane
from headrace.terms.program import Op, Verb

positive = st.floats(1e3, 1e15)


@given(flops=positive, peak=positive, moved=st.lists(st.tuples(positive, positive), max_size=3))
def test_seconds_are_operations_over_what_is_attained(flops: float, peak: float, moved: list[tuple[float, float]]):
    """The paper's own form: the least of the peak and of bandwidth times intensity at each level."""
    attained = min([peak, *(bandwidth * flops / num_bytes for num_bytes, bandwidth in moved)])
    assert roofline_seconds(flops, peak, *moved) == pytest.approx(flops / attained)


def test_nothing_touched_takes_the_peaks_time():
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
