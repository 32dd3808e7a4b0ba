"""Rows of a frozen embedding in plans: taken where the whole has no room or is slower, with their memory, bytes and seconds.

Run: pytest tests/plan/test_rows_in_plans.py
"""

import itertools
import json
from dataclasses import replace
from functools import partial

import pytest
from machines import machine as small_machine
from small_plans import small_plan
from test_search import LENGTH, WIDTH, costs_of, machine, problem
from tiers import sampled

from headrace.plan.forecast.forecast import forecast
from headrace.plan.schedules.ranks import RankMachine
from headrace.plan.search.given import adopted
from headrace.plan.search.problem import Problem
from headrace.plan.search.search import make_plan
from headrace.plan.search.space import placements_of, plan_of
from headrace.plan.value.buffer_sizes import buffer_groups
from headrace.plan.value.plan import Plan
from headrace.terms.block_parts import PART_SLOTS
from headrace.terms.costs import ModelCosts
from headrace.terms.embedding_rows import SECONDS_PER_ROW, EmbeddingRows
from headrace.terms.errors import ConfigError, PlanInfeasible
from headrace.terms.forms import UnitFigures, home_of
from headrace.terms.sizes import MIB

TABLE = EmbeddingRows(rows=1000, stored_bytes=2 * WIDTH, computed_bytes=2 * WIDTH)


def frozen(host_mib: int, device_bytes: int | None) -> Problem:
    """Return the question of `test_search`, where the embedding is not trained and may be read by rows."""
    made = problem(host_mib * MIB, device_bytes=device_bytes)
    return replace(made, forms=(replace(made.forms[0], trained=None), *made.forms[1:]), embedding=TABLE)


def least_device_bytes(made: Problem) -> int:
    with pytest.raises(PlanInfeasible) as refusal:
        make_plan(replace(made, allowance=replace(made.allowance, device_bytes=1)), machine(made))
    assert refusal.value.tier == "device"
    return refusal.value.needed_bytes


@pytest.mark.deep
def test_rows_are_read_only_where_the_whole_has_no_room_and_more_memory_is_never_slower() -> None:
    least, of_whole = (least_device_bytes(each) for each in (frozen(900, 1), replace(frozen(900, 1), embedding=None)))
    # The freed megabyte, rounded to whole pages; what comes to the slot by way of the host needs no buffer there.
    assert of_whole - least == pytest.approx(TABLE.whole_bytes, rel=0.1)
    seconds = []
    for device in (least, of_whole, 2 * of_whole, 8 * of_whole):
        made = frozen(900, device)
        plan = make_plan(made, machine(made))
        assert plan.fits
        seconds.append(forecast(plan, machine(made)).step_seconds)
        if plan.embedding is not None:
            whole = replace(made, embedding=None)
            try:
                assert forecast(make_plan(whole, machine(made)), machine(made)).step_seconds > seconds[-1]
            except PlanInfeasible:
                assert device < of_whole
        assert (plan.embedding is not None) == any("rows of the embedding" in note for note in plan.results.notes)
    assert make_plan(frozen(900, least), machine(frozen(900, least))).embedding == TABLE
    assert make_plan(frozen(900, 8 * of_whole), machine(frozen(900, 8 * of_whole))).embedding is None
    assert all(after <= 1.01 * before for before, after in itertools.pairwise(seconds)), seconds


@pytest.mark.parametrize("change", sampled(["trained", "ranks", "not there"]))
def test_rows_are_not_read_where_they_cannot_be(change: str) -> None:
    made = frozen(900, least_device_bytes(frozen(900, 1)))
    ceilings = machine(made)
    if change == "trained":
        made = replace(made, forms=problem(900 * MIB).forms)
    if change == "not there":
        made = replace(made, embedding=None)
    if change == "ranks":
        ceilings = RankMachine.of(ceilings, 2)
    with pytest.raises(PlanInfeasible):
        make_plan(made, ceilings)


@pytest.mark.wide
def test_a_given_plan_that_reads_rows_is_for_runs_that_can() -> None:
    made = frozen(900, least_device_bytes(frozen(900, 1)))
    plan = make_plan(made, machine(made))
    assert adopted(plan, made).embedding == TABLE
    for other in (None, replace(TABLE, stored_bytes=4 * WIDTH)):
        with pytest.raises(ConfigError, match="rows of the embedding are read one by one in the plan, and cannot be here"):
            adopted(plan, replace(made, embedding=other))


def test_memory_bytes_and_seconds_are_those_of_the_rows_of_a_micro_batch() -> None:
    device = 1000 * MIB
    made = frozen(900, device)
    whole = next(map(partial(plan_of, made), placements_of(made, made.policies[0], 0)))
    by_rows = replace(whole, embedding=TABLE)
    groups, before = buffer_groups(by_rows), buffer_groups(whole)
    slot = before["resident_weights"].total_bytes - groups["resident_weights"].total_bytes
    assert slot == pytest.approx(TABLE.whole_bytes, abs=4096)
    tokens = whole.batch.micro_batch_sequences * LENGTH
    assert TABLE.held_bytes(tokens) == min(1000, tokens) * 4 * WIDTH + tokens * (2 * WIDTH + 64)
    assert by_rows.read_embedding_bytes == whole.batch.num_micro_batches * min(1000, tokens) * 2 * WIDTH


def test_compute_waits_for_rows() -> None:
    """Two micro-batches of 64 tokens, whose rows are all different, or of a table of 10 rows."""
    units = tuple(
        UnitFigures(name=f"unit{index}", num_elements=8192, num_parameters=8000, home=home_of(index, 4), trained_elements=0)
        if index == 0
        else unit
        for index, unit in enumerate(small_plan().units)
    )
    plan = small_plan(units=units, forward_flops=(0.0, *(1e12,) * 4, 0.0), epilogue_flops=1e12)
    slow = small_machine(compute=1e12)
    before = forecast(plan, slow)
    for rows in (10**6, 10):
        table = EmbeddingRows(rows=rows, stored_bytes=4096, computed_bytes=4096)
        found = forecast(replace(plan, embedding=table), slow)
        read = min(rows, 64)
        assert found.step_seconds - before.step_seconds == pytest.approx(2 * read * SECONDS_PER_ROW, abs=3e-5)
        assert found.ssd_bytes_read_per_step - before.ssd_bytes_read_per_step == 2 * read * 4096
        assert found.flops_per_step == before.flops_per_step


@pytest.mark.wide
def test_a_frozen_head_comes_for_the_loss_only_where_the_device_is_short() -> None:
    """A head of 1 MB, and blocks that take more of the device than the loss does: what it takes is free while they run."""

    def costs_with_large_blocks(rows: int) -> ModelCosts:
        costs = costs_of(rows)
        larger = (replace(each, backward_workspace_bytes=each.backward_workspace_bytes + 64 * MIB) for each in costs.blocks)
        return replace(costs, blocks=tuple(larger))

    ends = replace(frozen(900, 1), costs_of=costs_with_large_blocks)
    made = replace(ends, forms=(*ends.forms[:-1], replace(ends.forms[-1], trained=None)), own_head=True)
    least, staying = least_device_bytes(made), least_device_bytes(replace(made, own_head=False))
    head = 2 * made.forms[-1].layout.num_elements
    assert 0 < staying - least <= head + 4096
    plans = {}
    for device in (least, staying, 8 * staying):
        asked = replace(made, allowance=replace(made.allowance, device_bytes=device))
        plans[device] = make_plan(asked, machine(asked))
        assert plans[device].fits
        notes = " ".join(plans[device].results.notes)
        assert ("the head comes from host memory" in notes) == (plans[device].visiting_head == "host")
    tight, roomy = plans[least], plans[8 * staying]
    assert (tight.visiting_head, roomy.visiting_head) == ("host", None)
    room = replace(made.allowance, device_bytes=staying)
    assert adopted(tight, replace(made, allowance=room)).visiting_head == "host"
    assert Plan.from_json(json.loads(json.dumps(tight.to_json()))) == tight
    with pytest.raises(ConfigError, match="the head has its memory for the loss only in the plan, and cannot here"):
        adopted(tight, replace(ends, allowance=room))


@pytest.mark.wide
def test_a_frozen_head_comes_by_ranges_where_the_whole_has_no_room_beside_the_loss() -> None:
    """Here the loss takes more of the device than a block does, so that a head that visits spares nothing."""

    def costs_with_a_large_loss(rows: int) -> ModelCosts:
        costs = costs_of(rows)
        larger = tuple((tokens, num_bytes + 64 * MIB) for tokens, num_bytes in costs.epilogue_workspace_bytes)
        return replace(costs, epilogue_workspace_bytes=larger)

    ends, slot = replace(frozen(900, 1), costs_of=costs_with_a_large_loss), 128 * 1024
    layout = ends.forms[-1].layout  # made larger than the hidden states that wait while ranges come
    head = replace(ends.forms[-1], trained=None, layout=replace(layout, num_elements=8 * layout.num_elements))
    made = replace(ends, forms=(*ends.forms[:-1], head), own_head=True)
    ranged = replace(made, head_range_bytes=slot)
    least, whole = least_device_bytes(ranged), least_device_bytes(made)
    assert 0 < whole - least <= 2 * made.forms[-1].layout.num_elements - PART_SLOTS * slot
    plans = {}
    for device in (least, whole):
        asked = replace(ranged, allowance=replace(ranged.allowance, device_bytes=device))
        plans[device] = make_plan(asked, machine(asked))
        assert plans[device].fits
        by_ranges = any("range by range" in note for note in plans[device].results.notes)
        assert by_ranges == (plans[device].head_slot_bytes == slot)
    tight = plans[least]
    assert (tight.head_slot_bytes, plans[whole].head_slot_bytes) == (slot, None)
    assert Plan.from_json(json.loads(json.dumps(tight.to_json()))) == tight
    assert tight.ranged_head_bytes == 2 * tight.batch.num_micro_batches * tight.visiting_bytes
    twice = replace(ranged, workload=replace(ranged.workload, head_passes=2))
    assert least_device_bytes(twice) >= whole, "a loss of the whole step passes the head twice"


def test_ranges_of_a_head_come_while_compute_has_others() -> None:
    """Compute waits for the first range; for the others only as far as the link takes longer than the loss."""
    made = frozen(900, 1000 * MIB)
    made = replace(made, forms=(*made.forms[:-1], replace(made.forms[-1], trained=None)))
    whole = next(map(partial(plan_of, made), placements_of(made, made.policies[0], 0)))
    micros, slot = whole.batch.num_micro_batches, 4096
    ranged = replace(whole, visiting_head="host", head_slot_bytes=slot)
    assert ranged.visiting_bytes > 8 * slot

    def wait(rate: float) -> float:
        link = machine(made, host_to_device_bytes_per_second=rate)
        return (forecast(ranged, link).step_seconds - forecast(whole, link).step_seconds) / micros

    assert wait(1e12) == pytest.approx(slot / 1e12, abs=1e-6)
    slow, slower = wait(1e5), wait(5e4)
    come = 2 * ranged.visiting_bytes / 1e5
    assert slower - slow == pytest.approx(come, rel=0.01)
    computing = come - slow
    assert computing > 0
    assert wait(ranged.ranged_head_bytes / micros / (computing / 2)) < 0.1 * computing, "half of the loss's time is enough"


def test_compute_waits_for_a_head_once_a_step() -> None:
    made = frozen(900, 1000 * MIB)
    made = replace(made, forms=(*made.forms[:-1], replace(made.forms[-1], trained=None)))
    whole = next(map(partial(plan_of, made), placements_of(made, made.policies[0], 0)))
    slow = machine(made, host_to_device_bytes_per_second=1e7)
    before, found = (forecast(replace(whole, visiting_head=home), slow) for home in (None, "host"))
    head = whole.stored_bytes(whole.ends[-1])
    assert found.step_seconds - before.step_seconds == pytest.approx(head / 1e7, rel=0.1)
    from_drives = forecast(replace(whole, visiting_head="ssd"), slow)
    assert from_drives.ssd_bytes_read_per_step - before.ssd_bytes_read_per_step == head
