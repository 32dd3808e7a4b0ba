"""A stage plans its own blocks alone, in the numbers of the whole model, and counts what waits for its groups."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_search import BLOCKS, machine, problem
from tiers import sampled

from headrace.plan.forecast.forecast import forecast, programs_of
from headrace.plan.search.search import make_plan
from headrace.plan.search.staging import placed, stage_problem
from headrace.plan.value.buffer_sizes import buffer_groups, scratch_bytes
from headrace.plan.value.plan import Plan
from headrace.plan.value.stage_place import StagePlace
from headrace.terms.lanes import Lane
from headrace.terms.program import Program, Verb, Waiting
from headrace.terms.sizes import GIB, MIB

CUTS = (1, 3)


@cache
def stage_plans(clip: bool) -> list[tuple[Plan, Plan]]:
    """Return the plan of each stage as it is found, and as it is placed."""
    whole = problem(GIB, device_bytes=GIB, clip=clip, rows=8)
    found = []
    for number in range(len(CUTS) + 1):
        place = StagePlace.of(number, CUTS, BLOCKS, tied=False)
        plan = make_plan(stage_problem(whole, place), machine(whole))
        found.append((plan, placed(plan, place, whole.units)))
    return found


@pytest.mark.wide
@pytest.mark.parametrize("clip", sampled([False, True], [True]))
def test_stages_have_the_model_among_them_and_each_has_less(clip: bool) -> None:
    whole = problem(GIB, device_bytes=GIB, clip=clip, rows=8)
    one = make_plan(whole, machine(whole))
    plans = [plan for _, plan in stage_plans(clip)]
    states = [plan.results.peak_bytes["ssd"]["states, two slots"] for plan in plans]
    assert sum(states) == one.results.peak_bytes["ssd"]["states, two slots"]
    assert [plan.own_blocks for plan in plans] == [range(1, 2), range(2, 4), range(4, 5)]
    assert {plan.num_parameters for plan in plans} == {one.num_parameters}
    weights = [plan.results.peak_bytes["device"]["weights"] for plan in plans]
    assert max(weights) < one.results.peak_bytes["device"]["weights"], "what is around the blocks is only at the ends"


@pytest.mark.parametrize("clip", sampled([False, True], [True]))
def test_a_placed_plan_has_the_buffers_that_were_counted(clip: bool) -> None:
    for found, plan in stage_plans(clip):
        sizes = sorted((group.tier, group.purpose, group.total_bytes) for group in buffer_groups(found).values())
        assert sorted((group.tier, group.purpose, group.total_bytes) for group in buffer_groups(plan).values()) == sizes
        assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.wide
def test_sums_that_wait_take_four_bytes_a_parameter_of_the_blocks() -> None:
    for _, plan in stage_plans(True):
        waiting = [group for name, group in buffer_groups(plan).items() if name.startswith("parked")]
        assert plan.stage is not None
        assert plan.stage.groups > 1
        assert sum(group.num_bytes for group in waiting) == 4 * sum(plan.units[unit].num_elements for unit in plan.own_blocks)
        assert {group.tier for group in waiting} == {"host"}


def test_sums_that_wait_on_the_ssd_take_two_buffers_and_go_there_and_back_once_between_two_groups() -> None:
    for _, plan in stage_plans(True):
        assert plan.stage is not None
        laid = replace(plan, stage=replace(plan.stage, sums="ssd"))
        own = [4 * plan.units[unit].num_elements for unit in plan.own_blocks]
        sizes = [
            sum(group.total_bytes for group in buffer_groups(each).values() if group.tier == "host") for each in (plan, laid)
        ]
        assert sizes[0] - sizes[1] == sum(own) - 2 * max(own)
        assert scratch_bytes(laid) - scratch_bytes(plan) == sum(own)
        program, count = programs_of(laid, durable=True)[-1], (plan.stage.groups - 1) * len(own)
        for verb, lane in ((Verb.OUT, Lane.SSD_WRITE), (Verb.IN, Lane.SSD_READ)):
            found = [op for op in program.ops if op.waiting is Waiting.SUM and op.lane is lane]
            assert {op.verb for op in found} == {verb}
            assert sum(op.bytes for op in found) == sum(own) * (plan.stage.groups - 1)
            assert len(found) == count
        assert Plan.from_json(laid.to_json()) == laid


@pytest.mark.deep
def test_sums_wait_on_the_ssd_where_memory_for_them_would_take_groups_away() -> None:
    found = []
    for mib in (200, 50):
        whole = problem(mib * MIB, device_bytes=GIB, clip=True, rows=8)
        plan = make_plan(stage_problem(whole, StagePlace.of(1, (1,), BLOCKS, tied=False)), machine(whole))
        assert plan.stage is not None
        found.append((plan.stage.sums, plan.stage.groups))
    assert found == [("host", 8), ("ssd", 8)]


@pytest.mark.wide
def test_a_stage_reads_its_blocks_once_for_each_group_and_touches_no_others() -> None:
    for found, plan in stage_plans(True):
        assert plan.stage is not None
        program = programs_of(plan, durable=True)[-1]
        touched = {op.unit for op in program.ops if op.verb in (Verb.FORWARD, Verb.BACKWARD, Verb.UPDATE, Verb.FETCH)}
        assert touched - {0, BLOCKS + 1} == set(plan.own_blocks)
        assert _count(program, Verb.FORWARD) == plan.batch.num_micro_batches * len(plan.own_blocks)
        sums = [op.lane for op in program.ops if op.waiting is Waiting.SUM]
        assert (
            sums.count(Lane.DEVICE_TO_HOST) == sums.count(Lane.HOST_TO_DEVICE) == (plan.stage.groups - 1) * len(plan.own_blocks)
        )
        assert forecast(found, machine(problem(GIB))).step_seconds == pytest.approx(
            forecast(plan, machine(problem(GIB))).step_seconds, rel=1e-3
        )


def _count(program: Program, verb: Verb) -> int:
    return sum(op.verb is verb for op in program.ops)


@given(st.integers(1, 40), st.integers(2, 6), st.data())
def test_no_more_wait_for_backward_than_are_counted(num_micro: int, count: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, count - 1))
    planned = StagePlace.of(number, range(1, count), count, tied=False).choices(num_micro)
    taken = data.draw(st.integers(1, num_micro))  # a step may have fewer micro-batches than was planned
    groups = planned.groups_of(taken)
    assert [micro for group in groups for micro in group] == list(range(taken))
    assert all(abs(len(one) - len(another)) <= 1 for one, another in pairwise(groups))
    most = planned.micros_in_flight(num_micro)
    for at in range(len(groups)):
        waiting = groups[at : at + planned.in_flight]
        assert waiting[-1].stop - waiting[0].start <= most
