"""The forecast: exact on plans that a hand can count, bounded from below, monotone, and quick for 96 blocks."""

from dataclasses import replace
from typing import Any

import pytest
from cpu_work import loops_in
from drawn_plans import plans
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import machine
from plan_changes import changed
from small_plans import small_plan
from tiers import sampled

from headrace.plan.forecast.forecast import StepSeconds, forecast, redo_seconds, scoring_seconds
from headrace.plan.schedules.ledger import Snapshot
from headrace.plan.schedules.train import build_program
from headrace.plan.value.expert_plan import ExpertFigures, ExpertParts
from headrace.plan.value.plan import Plan
from headrace.terms.errors import ConfigError
from headrace.terms.forms import UnitFigures, home_of
from headrace.terms.lanes import Lane
from headrace.terms.machine.ceilings import Ceilings


def large_plan(num_blocks: int = 96, micro: int = 32, elements: int = 900_000_000 // 2048 * 2048, **changes: Any) -> Plan:
    units = [
        UnitFigures(name=f"unit{index}", num_elements=elements, num_parameters=elements, home=home_of(index, num_blocks))
        for index in range(num_blocks + 2)
    ]
    values: dict[str, Any] = {
        "separate_device": True,
        "device_slots": 3,
        "units": tuple(units),
        "num_micro_batches": micro,
        "tokens_per_step": 2048 * micro,
        "sequence_length": 2048,
        "hidden_size_bytes": 16384,
        "chunk_elements": 8 << 20,
        "stash_tiers": ("host",) * num_blocks,
        "forward_flops": (0.0,) + (2.0 * elements * 2048,) * num_blocks + (0.0,),
        "epilogue_flops": 1e12,
        "compute_threads": 8,
        "update_threads": 8,
    }
    return small_plan(num_blocks, **(values | changes))


@pytest.mark.wide
def test_a_coarse_plan_of_units_of_several_forms_does_the_same_work() -> None:
    """Blocks of one form are merged with one another alone: frozen ones with trained ones would be trained in part."""
    plan = large_plan(update_policy="deferred", late_units=(), host_slots=96)

    def formed(index: int, unit: UnitFigures) -> UnitFigures:
        return replace(unit, trained_elements=0) if 1 <= index <= 96 and index % 3 else unit

    units = tuple(formed(index, unit) for index, unit in enumerate(plan.units))
    plan = replace(plan, units=units)
    plan = changed(plan, late_units=plan.updated_units, resident_states=plan.updated_units)
    fine, coarse = (forecast(plan, machine(), most_operations=most) for most in (10**6, 2000))
    assert len(coarse.timeline.step_ops()) < 2500 < len(fine.timeline.step_ops())
    for lane in (Lane.SSD_READ, Lane.SSD_WRITE, Lane.DEVICE_TO_HOST, Lane.HOST_TO_DEVICE, Lane.UPDATE):
        # What is still on the device at the turn is not brought again: of larger blocks it is more.
        rel = 0.02 if lane is Lane.HOST_TO_DEVICE else 1e-6
        assert coarse.timeline.lanes[lane].bytes == pytest.approx(fine.timeline.lanes[lane].bytes, rel=rel), lane


def test_a_step_limited_by_compute_takes_its_operations() -> None:
    plan = small_plan(forward_flops=(0.0, *(1e12,) * 4, 0.0), epilogue_flops=1e12)
    found = forecast(plan, machine(compute=1e12))
    # Forward 1, backward 3 (with the recompute), the head 3: of each of two micro-batches.
    assert found.step_seconds == pytest.approx(2 * (4 * (1 + 3) + 3), rel=1e-3)
    assert found.bottleneck is Lane.COMPUTE
    assert found.tokens_per_second == pytest.approx(plan.batch.tokens_per_step / found.step_seconds)
    assert found.utilisation[Lane.COMPUTE] == pytest.approx(1.0, abs=1e-3)


@settings(max_examples=10, deadline=None)
@given(st.lists(plans(), min_size=1, max_size=2), st.sampled_from([40, 6000]), st.booleans())
def test_seconds_that_are_remembered_are_those_of_the_forecast(made: list[Plan], most_operations: int, device: bool) -> None:
    ceilings = replace(machine(), has_device=device, fresh_pages_share=0.5)
    made += [changed(made[0], freed_memory="kept"), changed(made[0], checkpoint_every=10), changed(made[0], update_threads=1)]
    seconds_of = StepSeconds(ceilings)
    expected = [forecast(plan, ceilings, most_operations=most_operations).step_seconds for plan in made]
    for _ in range(2):
        assert [seconds_of(plan, most_operations) for plan in made] == expected


def test_what_blocks_and_head_take_besides_products_is_counted_once() -> None:
    # Eight tokens of width 16 in each of two micro-batches; bfloat16 has two bytes an element.
    shape = {"tokens_per_step": 16, "sequence_length": 4, "micro_batch_sequences": 2}
    shape |= {"hidden_size_bytes": 2 * 16, "loss_chunk_tokens": 3}
    parameters = 1000  # of the head, in products of two operations for each of eight tokens
    plan = small_plan(forward_flops=(0.0, *(1e12,) * 4, 0.0), epilogue_flops=2.0 * 8 * parameters, **shape)
    besides = {"hidden_seconds": 1 / 64, "logit_seconds": 1 / 50, "head_seconds": 1 / 1000}
    plain, found = (forecast(plan, machine(compute=1e12, **changes)) for changes in ({}, besides))
    blocks = 4 * 8 * 16 / 64
    head = 8 * parameters / 16 / 50 + 3 * parameters / 1000  # logits, and three chunks of the loss
    assert found.step_seconds - plain.step_seconds == pytest.approx(2 * (blocks + head), rel=1e-3)
    assert found.flops_per_step == plain.flops_per_step == 2 * (4 * 4e12 + 3 * 2 * 8 * parameters)


def test_attention_takes_longer_than_products_unless_it_is_kept() -> None:
    blocks = {"forward_flops": (0.0, *(1e12,) * 4, 0.0), "attention_flops": (2e11,) * 4, "epilogue_flops": 0.0}
    operators = {"operators": (("mm", "attention", "mm"),) * 4, "skipped": ((2,),) * 4, "spared_flops": (3e11,) * 4}
    slow = machine(compute=1e12, attention_share=0.25)
    recomputed = forecast(small_plan(**blocks, **operators), slow)
    # A fifth of a block takes four times as long, four times over; the last product is not computed again.
    assert recomputed.step_seconds == pytest.approx(2 * 4 * (4 * (0.8 + 4 * 0.2) - 0.3), rel=1e-3)
    kept = small_plan(**blocks, **operators | {"kept": ((1,),) * 4, "spared_flops": (5e11,) * 4})
    assert recomputed.step_seconds - forecast(kept, slow).step_seconds == pytest.approx(2 * 4 * 4 * 0.2, rel=1e-3)


def test_bytes_are_those_of_the_repeating_program() -> None:
    plan = small_plan()
    carry = Snapshot()
    for _ in range(5):
        program, carry = build_program(plan, plan.batch.num_micro_batches, carry)
    found = forecast(plan, machine())
    assert found.ssd_bytes_read_per_step == sum(op.bytes for op in program.lane(Lane.SSD_READ))
    assert found.ssd_bytes_written_per_step == sum(op.bytes for op in program.lane(Lane.SSD_WRITE)) == 6 * 8192 * 12


def test_resident_states_are_written_at_checkpoints() -> None:
    every = {"update_policy": "deferred", "host_slots": 4, "resident_states": tuple(range(6))}
    one = forecast(small_plan(**every), machine(write=1e6))
    ten = forecast(small_plan(**every, checkpoint_every=10), machine(write=1e6))
    assert one.ssd_bytes_written_per_step == 6 * 8192 * 12
    assert ten.ssd_bytes_written_per_step == 6 * 8192 * 12 // 10, "weights stay in memory, too: 1.2 bytes per parameter"
    assert one.step_seconds > 6 * 8192 * 10 / 1e6 > ten.step_seconds


def test_a_checkpoint_of_states_in_memory_is_waited_for_once_in_so_many_steps() -> None:
    """It was spread over the steps between two of them, and seemed to hide behind their compute."""
    every = {"update_policy": "deferred", "host_slots": 4, "resident_states": tuple(range(6))}
    # A step computes for as long as a checkpoint would take if a fifth of it were written in each.
    ceilings = machine(write=1e6, compute=6 * 4 * 2 * 1e6 / 0.1)
    always, ten, never = (
        forecast(small_plan(**every, checkpoint_every=steps), ceilings).step_seconds for steps in (1, 10, 10**9)
    )
    assert always > 1.2 * never
    assert ten == pytest.approx((9 * never + always) / 10, rel=1e-3)


def test_the_commit_and_launches_cost_what_the_profile_says() -> None:
    quick = forecast(small_plan(), machine(commit_seconds=0.0))
    assert forecast(small_plan(), machine(commit_seconds=2.0)).step_seconds >= 2.0 > quick.step_seconds
    plan = small_plan(forward_flops=(0.0,) * 6, epilogue_flops=0.0)
    launches = 2 * (2 * 4 + 3) + 1
    assert forecast(plan, machine(launch_seconds=1.0)).step_seconds == pytest.approx(launches, rel=1e-3)


@pytest.mark.parametrize("profile", [machine(), machine(compute=2e14), machine(read=2e9, write=2e9, mixed=3e9)])
def test_a_cut_into_fewer_operations_keeps_time_and_bytes(profile: Ceilings) -> None:
    plan = large_plan(12, micro=12, elements=80 << 20, chunk_elements=1 << 20, state_slots=4)
    fine, coarse = (forecast(plan, profile, most_operations=most) for most in (10**6, 2000))
    assert len(coarse.timeline.step_ops()) <= 2100 < len(fine.timeline.step_ops())
    assert coarse.step_seconds == pytest.approx(fine.step_seconds, rel=0.1)
    assert coarse.ssd_bytes_read_per_step == fine.ssd_bytes_read_per_step
    assert coarse.ssd_bytes_written_per_step == fine.ssd_bytes_written_per_step


@pytest.mark.parametrize("together", sampled([1, 2, 5, 32]))
def test_a_cut_into_fewer_operations_brings_experts_as_often(together: int) -> None:
    """Joined micro-batches were so few that an expert came for fewer groups, or for more, than in the step."""
    figures = ExpertFigures(
        units=(),
        num_experts=(0, *(64,) * 12, 0),
        elements=1 << 20,
        stored_bytes=2 << 20,
        is_made=False,
        making_bytes=0,
        num_parameters=1 << 20,
    )
    plan = large_plan(12, elements=8 << 20)
    units = tuple(replace(unit, trained_elements=0) for unit in plan.units)
    parts = ExpertParts(figures=figures, choices=2, in_round=16, together=together)
    plan = changed(plan, units=units, experts=parts, update_policy="immediate", late_units=())
    fine, coarse = (forecast(plan, machine(), most_operations=most) for most in (10**6, 1000))
    assert len(coarse.timeline.step_ops()) < 0.7 * len(fine.timeline.step_ops())
    for lane in (Lane.SSD_READ, Lane.HOST_TO_DEVICE):
        assert coarse.timeline.lanes[lane].bytes == pytest.approx(fine.timeline.lanes[lane].bytes, rel=0.03), lane
    assert coarse.timeline.lanes[Lane.COMPUTE].flops == pytest.approx(fine.timeline.lanes[Lane.COMPUTE].flops, rel=0.01)


def test_launches_survive_the_cut() -> None:
    plan = large_plan(20, micro=64, forward_flops=(0.0,) * 22, epilogue_flops=0.0, elements=2048, chunk_elements=2048)
    found = forecast(plan, machine(launch_seconds=0.1), most_operations=3000)
    assert len(found.timeline.step_ops()) < 64 * 20 * 2
    assert found.step_seconds == pytest.approx(0.1 * 64 * (2 * 20 + 2), rel=0.05)


def test_ninety_six_blocks_take_less_than_a_second() -> None:
    loops, found = loops_in(lambda: forecast(large_plan(), machine(compute=1.5e14, read=7e9, write=6e9)))
    assert loops < 30  # about 10: a second of an idle core
    assert found.lower_bound_seconds <= found.step_seconds


@settings(max_examples=25, deadline=None)
@given(
    compute=st.floats(1e8, 1e11),
    read=st.floats(1e6, 1e9),
    write=st.floats(1e6, 1e9),
    share=st.floats(0.3, 1.0),
    kept=st.floats(0.1, 1.0),
    deferred=st.booleans(),
    stash=st.sampled_from(("device", "ssd")),
)
def test_no_forecast_beats_its_lower_bound(
    compute: float, read: float, write: float, share: float, kept: float, deferred: bool, stash: str
) -> None:
    plan = small_plan(
        update_policy="deferred" if deferred else "immediate",
        stash_tiers=(stash,) * 4,
        stash_slots=3 if stash == "ssd" else 0,
    )
    slowdowns = {"compute": {"update": kept, "ssd-read": 0.9}, "update": {"compute": kept}, "ssd-read": {"update": kept}}
    profile = machine(
        compute=compute, read=read, write=write, mixed=share * (read + write), update=1e9, memory=1e9, slowdowns=slowdowns
    )
    found = forecast(plan, profile)
    assert found.lower_bound_seconds <= found.step_seconds * (1 + 1e-6)
    assert found.lower_bound_seconds > 0


def test_a_machine_without_a_device_shares_its_cores() -> None:
    shared = machine(has_device=False, device_memory_bytes=0, slowdowns={"compute": {"update": 0.5}})
    alone = machine(has_device=False, device_memory_bytes=0)
    plan = small_plan(forward_flops=(0.0, *(2e10,) * 4, 0.0), compute_threads=8)
    slow = changed(plan, units=tuple(replace(unit, num_elements=1 << 24) for unit in plan.units), chunk_elements=1 << 22)
    assert forecast(slow, shared).step_seconds > 1.05 * forecast(slow, alone).step_seconds


@pytest.mark.parametrize("flops", [2e10, 2e11])
def test_the_lower_bound_counts_each_core_once(flops: float) -> None:
    # Two cores; compute has a thread on each, the update a third thread: of two cores each thread gets two thirds of one.
    kept = 2 / 3
    profile = machine(
        has_device=False,
        device_memory_bytes=0,
        cores=2,
        update=2e9,
        update_bytes_per_second_per_core=1e9,
        slowdowns={"compute": {"update": kept}, "update": {"compute": kept}},
    )
    units = tuple(replace(unit, num_elements=1 << 24) for unit in small_plan().units)
    plan = small_plan(
        forward_flops=(0.0, *(flops,) * 4, 0.0), units=units, chunk_elements=1 << 22, compute_threads=2, update_threads=1
    )
    found = forecast(plan, profile)
    compute, update = (found.timeline.lanes[lane].alone_seconds for lane in (Lane.COMPUTE, Lane.UPDATE))
    if compute > update:
        # The update ends first, so that both cores are busy all the time.
        expected = (2 * compute + update) / 2
    else:
        # One thread of the update goes on alone with what it has not done beside compute, two thirds as fast.
        expected = compute / kept + (update - compute)
    assert found.lower_bound_seconds == pytest.approx(expected, rel=1e-6)
    assert (compute > update) == (flops > 1e11)


def test_the_lower_bound_lets_duplex_drives_go_both_ways_at_once() -> None:
    plan = small_plan(units=tuple(replace(unit, num_elements=1 << 24) for unit in small_plan().units), chunk_elements=1 << 22)
    rates = {"read": 1e7, "write": 5e6}
    duplex, half = (forecast(plan, machine(**rates, mixed=mixed)) for mixed in (15e6, 7.5e6))
    read, written = duplex.ssd_bytes_read_per_step, duplex.ssd_bytes_written_per_step
    assert duplex.lower_bound_seconds == pytest.approx(max(read / 1e7, written / 5e6), rel=1e-3)
    assert half.lower_bound_seconds == pytest.approx(read / 1e7 + written / 5e6, rel=1e-3)


def test_an_unknown_compute_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="float32"):
        forecast(small_plan(compute_dtype="float32", gradient_dtype="float32"), machine())


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
def test_updates_that_are_done_again_take_what_they_take_in_a_step(moments: str) -> None:
    """Smaller moments cost a core more arithmetic in a step, and no less when the step's updates are repeated."""
    profile = machine(update=2e9, read=50e9, write=50e9, has_device=False, device_memory_bytes=0)
    plan = small_plan(moments=moments, update_policy="speculative", late_units=(1,), chunk_elements=1 << 22)
    plan = replace(plan, units=tuple(replace(unit, num_elements=1 << 24) for unit in plan.units))
    assert redo_seconds(plan, profile) == pytest.approx(forecast(plan, profile).work[Lane.UPDATE], rel=0.1)


def test_a_pass_that_scores_takes_the_operations_of_forward_and_head() -> None:
    plan = small_plan(forward_flops=(0.0, *(1e12,) * 4, 0.0), epilogue_flops=1e12)
    assert scoring_seconds(plan, machine(compute=1e12)) == pytest.approx(2 * (4 + 1), rel=1e-3)


@given(plans())
@settings(max_examples=10, deadline=None)
def test_a_pass_that_scores_takes_less_than_a_step(plan: Plan) -> None:
    assert 0 < scoring_seconds(plan, machine()) <= forecast(plan, machine()).step_seconds * 1.01
