"""The machine as a run's own steps show it: found again from what a forecast on the true one says its lanes do."""

import dataclasses
from dataclasses import replace

import pytest
from machines import machine
from small_plans import small_plan
from tiers import sampled

from headrace.plan.clock.nominal import nominal_machine
from headrace.plan.forecast.forecast import forecast
from headrace.plan.forecast.own_rates import NAME, SOURCE, Seen, is_worth_taking, machine_of_steps
from headrace.plan.value.plan import Plan
from headrace.terms.forms import UnitFigures, home_of
from headrace.terms.lanes import Lane
from headrace.terms.machine.ceilings import Ceilings

STEPS = 3


def streamed(**changes: object) -> Plan:
    """A plan with enough of everything that rates matter, and not what an operation takes besides."""
    blocks, elements = 12, 50_000_000 // 2048 * 2048
    units = tuple(
        UnitFigures(name=f"unit{index}", num_elements=elements, num_parameters=elements, home=home_of(index, blocks))
        for index in range(blocks + 2)
    )
    given = {
        "units": units,
        "num_micro_batches": 4,
        "micro_batch_sequences": 1,
        "tokens_per_step": 2048,
        "sequence_length": 512,
        "hidden_size_bytes": 8192,
        "loss_chunk_tokens": 512,
        "chunk_elements": 4 << 20,
        "forward_flops": (0.0,) + (2.0 * elements * 512,) * blocks + (0.0,),
        "epilogue_flops": 2.0 * elements * 512,
        "compute_threads": 2,
        "update_threads": 2,
    }
    return small_plan(blocks, **(given | changes))


def on_cpu(**rates: float) -> Ceilings:
    true = replace(machine(**rates), has_device=False, device_memory_bytes=0, cores=2, slowdowns={}, commit_seconds=0.02)
    return replace(true, flops_per_second=dict.fromkeys(("bfloat16", "float32"), rates["compute"]))


def seen_in(plan: Plan, true: Ceilings) -> dict[Lane, Seen]:
    """What three steps on the true machine would show."""
    timeline = forecast(plan, true).timeline
    operations = {lane: sum(timed.op.lane is lane for timed in timeline.step_ops()) for lane in Lane}
    return {
        lane: Seen(STEPS * use.busy_seconds, STEPS * use.bytes, STEPS * operations[lane])
        for lane, use in timeline.lanes.items()
        if operations[lane]
    }


MACHINES = {
    "slow cores, a fast drive": on_cpu(compute=8e10, read=2.4e9, write=1.1e9, mixed=2.2e9, update=9e9, memory=12e9),
    "a slow drive": on_cpu(compute=9e11, read=0.4e9, write=0.3e9, mixed=0.4e9, update=20e9, memory=25e9),
    "fast": on_cpu(compute=4e12, read=12e9, write=9e9, mixed=15e9, update=90e9, memory=120e9),
}


@pytest.mark.parametrize("name", sampled(MACHINES))
def test_steps_show_the_machine_that_ran_them(name: str) -> None:
    true, plan = MACHINES[name], streamed()
    assumed = nominal_machine(2, host_bytes=8 << 30, device_bytes=None)
    wrong = forecast(plan, assumed).step_seconds / forecast(plan, true).step_seconds
    assert not 0.8 < wrong < 1.25, "the test shows nothing where what is assumed is right"
    found = machine_of_steps(plan, assumed, seen_in(plan, true), STEPS)
    assert forecast(plan, found).step_seconds == pytest.approx(forecast(plan, true).step_seconds, rel=0.03)
    assert found.commit_seconds == pytest.approx(0.02)
    assert (found.name, found.sources["drives"]) == (NAME, SOURCE)
    assert Ceilings.from_json(found.to_json()) == found, "it is a profile as any other"
    # Another plan, which moves other amounts, is forecast about as on the true machine: how fast a drive writes alone does not
    # show in steps that also read all the time.
    other = streamed(host_slots=12, update_policy="deferred", resident_states=tuple(range(14)))
    assert forecast(other, found).step_seconds == pytest.approx(forecast(other, true).step_seconds, rel=0.2)


def test_what_is_known_already_stays() -> None:
    true, plan = MACHINES["slow cores, a fast drive"], streamed()
    found = machine_of_steps(plan, true, seen_in(plan, true), STEPS)
    for name in ("update_bytes_per_second", "host_memory_bytes_per_second", "ssd_read_bytes_per_second"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.01), name
    assert found.flops_per_second["bfloat16"] == pytest.approx(true.flops_per_second["bfloat16"], rel=0.01)


def test_lanes_that_did_nothing_keep_their_figures() -> None:
    plan, assumed = streamed(), nominal_machine(2, host_bytes=8 << 30, device_bytes=None)
    seen = {lane: has for lane, has in seen_in(plan, MACHINES["a slow drive"]).items() if lane is Lane.UPDATE}
    found = machine_of_steps(plan, assumed, seen, STEPS)
    assert found.drives == assumed.drives
    assert found.flops_per_second == assumed.flops_per_second
    assert found.update_bytes_per_second != assumed.update_bytes_per_second


def test_a_plan_is_worth_taking_if_it_is_a_tenth_faster_by_figures_that_were_seen() -> None:
    now, true = streamed(), MACHINES["a slow drive"]
    seen = seen_in(now, true)
    better = streamed(host_slots=12, update_policy="deferred", resident_states=tuple(range(14)))
    seconds = forecast(better, true).step_seconds
    assert seconds * 1.1 < forecast(now, true).step_seconds
    assert is_worth_taking(better, now, true, seen) == seconds
    assert is_worth_taking(now, now, true, seen) is None
    assert is_worth_taking(better, now, true, {lane: has for lane, has in seen.items() if lane is not Lane.UPDATE}) is None
    assert dataclasses.asdict(seen[Lane.SSD_READ])["bytes"] > 0
