"""Workers and a node on one clock: phases take their slowest stage, bytes are what formulas say, more is never slower."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import machine
from small_plans import small_plan
from tiers import sampled

from headrace.peers.node.cluster import NODE, WORKER, Cluster, ClusterForecast, Thing, forecast_cluster
from headrace.peers.node.links import Pattern
from headrace.plan.value.plan import Plan
from headrace.terms.forms import SSD, UnitFigures, home_of
from headrace.terms.lanes import Lane
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.program import Verb

BLOCKS, ELEMENTS = 24, 1 << 20
WEIGHTS = 2 * ELEMENTS  # bytes of a block
FAST = 2e13
STAGES = ("compute", "drives", "link", "update", "copies")


def worker_plan(blocks: int = BLOCKS, **changes: Any) -> Plan:
    """Return a worker's plan: everything is far, and nothing waits for the device's memory."""
    units = tuple(
        UnitFigures(
            name=f"unit{index}",
            num_elements=ELEMENTS if 1 <= index <= blocks else 64,
            num_parameters=ELEMENTS,
            home=home_of(index, blocks),
            is_far=True,
        )
        for index in range(blocks + 2)
    )
    return small_plan(
        blocks, units=units, **{"separate_device": True, "device_slots": 3, "prefetch": 2, "host_slots": 4} | changes
    )


SMALL = worker_plan(8, gradient_slots=4)


def node_plan(worker: Plan, **changes: Any) -> Plan:
    units = tuple(replace(unit, home=SSD, is_far=False) for unit in worker.units)
    values = {"chunk_elements": ELEMENTS // 8, "host_slots": 8, "state_slots": 4, "gradient_slots": 4, "accumulate": False}
    return replace(worker, serves=True, separate_device=False, units=units, **values | changes)


def rig(seconds: dict[str, float] | None = None, **more: Any) -> Cluster:
    """Return machines on which a block takes so many seconds in each stage of backward, and nothing where no stage is named."""
    taken = dict.fromkeys(STAGES, 1e-5) | (seconds or {})
    flops = 3 * 2 * 1e6  # of two micro-batches: recompute and backward
    fast = {"launch_seconds": 0.0, "memory": FAST, "update": FAST / 4, "read": 1e11, "write": 1e11}
    one = machine(
        **fast
        | {"compute": flops / taken["compute"], "inward": WEIGHTS / taken["copies"], "outward": WEIGHTS / taken["copies"]}
    )
    rate = 12 * ELEMENTS / taken["drives"]  # states and weights, each way
    other = machine(
        **fast | {"read": min(rate, 4e11), "write": min(rate, 4e11), "update": min(26 * ELEMENTS / taken["update"], 1e13)},
        has_device=False,
        device_memory_bytes=0,
    )
    return Cluster.of(
        one, other, link_bytes_per_second=WEIGHTS / taken["link"], **{"workers": 4, "pattern": Pattern.SWITCH} | more
    )


def forecast(cluster: Cluster, worker: Plan | None = None, **changes: Any) -> ClusterForecast:
    worker = worker or worker_plan(gradient_slots=4)
    return forecast_cluster(worker, node_plan(worker, **changes), cluster, tokens_per_step=128 * cluster.network.workers)


@pytest.mark.parametrize("slow", sampled(STAGES))
def test_a_phase_lasts_as_long_as_its_slowest_stage(slow: str):
    # T12: each stage takes 10 ms for a block, one of them 40: throughput is that of the slowest, not of the sum.
    stages = dict.fromkeys(STAGES, 0.010) | {slow: 0.040}
    found = forecast(rig(stages), worker_plan(40, gradient_slots=4, accumulators=2))
    # Filling and draining the pipeline takes each other stage once more at both ends.
    filling = 2 * sum(stages.values())
    assert found.backward.seconds * 1.001 >= 40 * 0.040
    assert found.backward.seconds - filling <= 1.1 * 40 * 0.040
    names = {
        "compute": Thing.COMPUTE,
        "drives": Thing.DRIVES,
        "link": Thing.LINKS,
        "update": Thing.CORES,
        "copies": Thing.COPIES,
    }
    assert found.backward.limit is names[slow]


def test_from_two_credits_on_no_unit_waits():
    # T10: a credit is room for a unit that is on its way; with one each unit waits for the last.
    stages = dict.fromkeys(("compute", "drives", "link", "update"), 0.010)
    seconds = {}
    for credits in (1, 2, 4):
        worker = worker_plan(40, gradient_slots=credits, host_slots=3 + credits, accumulators=2)
        seconds[credits] = forecast(rig(stages), worker, gradient_slots=credits, host_slots=4 + 2 * credits).backward.seconds
    assert seconds[1] > 1.5 * seconds[2]
    assert seconds[2] == pytest.approx(seconds[4], rel=0.05)
    assert seconds[2] <= 1.1 * (40 * 0.010 + 2 * 0.040)


def test_a_unit_is_updated_while_the_one_below_is_computed():
    found = forecast(rig(dict.fromkeys(("compute", "drives", "link", "update"), 0.010)))
    compute = [timed for timed in found.timeline.of_rank(WORKER) if timed.op.verb is Verb.BACKWARD]
    updates = [timed for timed in found.timeline.of_rank(NODE) if timed.op.lane is Lane.UPDATE]
    beside = {
        each.op.unit
        for each in updates
        for below in compute
        if below.op.unit < each.op.unit and each.start_seconds < below.stop_seconds and below.start_seconds < each.stop_seconds
    }
    assert len(beside) >= BLOCKS - 4


@pytest.mark.parametrize("pattern", sampled([Pattern.EXCHANGE, Pattern.SWITCH]))
@pytest.mark.parametrize("workers", sampled([1, 2, 3, 8]))
def test_bytes_are_what_the_formula_says(pattern: Pattern, workers: int):
    found = forecast(rig(workers=workers, pattern=pattern))
    copy = sum(2 * unit.num_elements for unit in worker_plan().units)
    pulled = sum(timed.op.bytes for timed in found.timeline.of_rank(WORKER) if timed.op.verb is Verb.PULL)
    # Twice the model, but for what is in the slots when forward turns into backward, and both ends, which stay.
    assert 2 * copy - 4 * WEIGHTS - 4 * 64 <= pulled <= 2 * copy
    others = (workers - 1) / workers if pattern is Pattern.EXCHANGE else 0
    assert found.worker_bytes.received == pytest.approx(pulled + others * copy, abs=1)
    assert found.worker_bytes.sent == pytest.approx(others * pulled + copy, abs=1)
    assert (found.node_bytes.sent, found.node_bytes.received) == (pulled, copy)
    states = sum(12 * unit.num_elements for unit in worker_plan().units)
    assert found.ssd_bytes_written_per_step == pytest.approx(states, rel=1e-3)  # whole pages
    assert found.ssd_bytes_read_per_step <= 1.001 * (states + copy)


def test_a_step_takes_what_the_closed_form_says_where_nothing_else_is_slow():
    # Forward S/B, backward 12 bytes of each parameter over the drives (14 where a master is not split).
    found = forecast(rig({"link": 0.020, "drives": 0.060}), worker_plan(40, gradient_slots=4))
    assert found.forward.seconds == pytest.approx(40 * 0.020, rel=0.1)
    assert found.backward.seconds == pytest.approx(40 * 0.060, rel=0.1)
    assert (found.forward.limit, found.backward.limit) == (Thing.LINKS, Thing.DRIVES)


stage_seconds = st.fixed_dictionaries({name: st.floats(0.001, 0.05) for name in STAGES})


@pytest.mark.wide
@given(stage_seconds, st.integers(1, 8), st.sampled_from(Pattern))
@settings(max_examples=5)
def test_more_drives_nodes_links_or_cores_are_never_slower(stages: dict[str, float], workers: int, pattern: Pattern):
    cluster = rig(stages, workers=workers, pattern=pattern)
    now = forecast(cluster, SMALL).step_seconds
    for more in (cluster.with_drives(2), cluster.with_nodes(2), cluster.with_links(2), cluster.with_cores(2)):
        assert forecast(more, SMALL).step_seconds <= now * 1.02


@pytest.mark.wide
@given(stage_seconds, st.sampled_from(Pattern))
@settings(max_examples=5)
def test_more_workers_with_as_many_tokens_each_are_never_fewer_tokens_a_second(stages: dict[str, float], pattern: Pattern):
    speeds = [forecast(rig(stages, workers=workers, pattern=pattern), SMALL).tokens_per_second for workers in (1, 2, 4, 8)]
    assert all(more >= fewer * 0.98 for fewer, more in pairwise(speeds))


@given(stage_seconds)
@settings(max_examples=5)
def test_no_step_is_faster_than_its_lower_bound(stages: dict[str, float]):
    found = forecast(rig(stages), SMALL)
    assert found.lower_bound_seconds <= found.step_seconds * (1 + 1e-9)
    assert found.step_seconds == pytest.approx(found.forward.seconds + found.backward.seconds)
    for phase in (found.forward, found.backward):
        assert all(0 <= share <= 1 + 1e-6 for share in phase.shares.values())


def test_deferred_updates_run_behind_the_next_forward():
    worker = worker_plan(gradient_slots=4)
    late = tuple(range(len(worker.units)))
    stages = dict.fromkeys(("compute", "drives", "link", "update"), 0.010)
    found = forecast_cluster(
        worker, node_plan(worker, update_policy="deferred", late_units=late), rig(stages), tokens_per_step=512
    )
    assert found.forward.shares[Thing.DRIVES] > 0.5 > found.backward.shares[Thing.DRIVES]


def test_what_is_cut_coarsely_takes_about_as_long():
    worker = worker_plan(48, gradient_slots=4)
    node, cluster = node_plan(worker), rig(dict.fromkeys(("compute", "drives", "link", "update"), 0.010))
    fine, coarse = (
        forecast_cluster(worker, node, cluster, tokens_per_step=512, most_operations=most).step_seconds
        for most in (20000, 1200)
    )
    assert coarse == pytest.approx(fine, rel=0.1)


def ceilings_of(cluster: Cluster) -> Ceilings:
    return cluster.all_nodes


def test_nodes_are_one_node_with_so_many_times_what_it_has():
    cluster = rig(workers=8)
    both = ceilings_of(cluster.with_nodes(2))
    assert len(both.drives) == 2 * len(cluster.node.drives)
    assert both.update_bytes_per_second == 2 * cluster.node.update_bytes_per_second
    assert cluster.with_nodes(2).network.crossing(Lane.NIC_DOWN).node_out == 0.5
