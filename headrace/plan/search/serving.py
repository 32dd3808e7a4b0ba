"""The plan of a node: its memory for units between its drives, its workers and its update cores.

The search is small. Chunks are as large as fit. Gradients stay in memory if clipping makes them wait and there is room. The
rest is for weights (read twice a step), then states (once). Pure: no clock, no files, no torch.
"""

from collections.abc import Iterator
from dataclasses import replace

from headrace.plan.forecast.footprint import with_serving_footprint
from headrace.plan.search.problem import Problem
from headrace.plan.search.search import infeasible
from headrace.plan.search.space import THRIFTS, state_buffers, with_resident_states
from headrace.plan.value.buffer_sizes import buffer_groups
from headrace.plan.value.choices import BatchShape, Gradients, Stash, Updates
from headrace.plan.value.plan import Plan
from headrace.plan.value.words import explain_update
from headrace.terms.forms import SSD
from headrace.terms.grouping import Grouping
from headrace.terms.machine.ceilings import Ceilings

# Units on their way at once: one is read, one is sent, one waits for a request, one is updated. Fewer if memory is short.
_HOST_SLOTS = (6, 4, 3, 2)


def serving_plan(problem: Problem, ceilings: Ceilings | None = None) -> Plan:
    """Return the plan of a node that serves `problem`, within its allowance. `ceilings` are not used: nothing is a trade-off.

    Raises:
        PlanInfeasible: the leanest buffers do not fit; the message names tier, needed and allowed bytes.
    """
    plan: Plan | None = None
    for plan in _candidates(problem):
        if plan.fits:
            return _filled(problem, plan)
    assert plan is not None, "there is a leanest candidate"
    raise infeasible(plan)


def with_grouping(plan: Plan, grouping: Grouping) -> Plan:
    """Return the plan of a node after its workers have agreed upon what decides their numbers."""
    rows = plan.batch.tokens_per_step // plan.batch.sequence_length
    return replace(
        plan,
        batch=replace(
            plan.batch,
            micro_batch_sequences=grouping.rows,
            num_micro_batches=-(-rows // grouping.rows),
            loss_chunk_tokens=grouping.loss_chunk_tokens,
            head_rows=grouping.head_rows,
        ),
        compute_threads=grouping.compute_threads,
    )


def grouping_of(plan: Plan) -> Grouping | None:
    """Return what decides the numbers of runs under `plan`; None where a node's workers have not agreed upon it."""
    if not plan.batch.micro_batch_sequences:
        return None
    batch = plan.batch
    return Grouping(batch.micro_batch_sequences, batch.loss_chunk_tokens, plan.compute_threads, batch.head_rows)


def explain_serving(plan: Plan) -> str:
    """Return the choices of a node's plan in words, and its peaks in one line for each tier."""
    lines = [
        f"node     {plan.num_parameters / 1e6:.3g} M parameters, {plan.num_blocks} blocks, {plan.rule.name}; workers compute "
        f"{plan.batch.tokens_per_step} tokens a step in {plan.compute_dtype}",
        f"update   {explain_update(plan)}; {plan.updates.threads} threads",
        f"slots    {plan.host_slots} of {len(plan.units)} units in host memory; states of {len(plan.updates.resident_states)}",
    ]
    return "\n".join([*lines, *plan.results.explain_peaks()])


def _candidates(problem: Problem) -> Iterator[Plan]:
    """Yield plans from the most generous to the leanest."""
    for slots in _HOST_SLOTS:
        for thrift in THRIFTS:
            for held in ("host", "ssd") if problem.clips else ("host",):
                yield _plan_of(problem, slots, thrift, held)


def _plan_of(problem: Problem, slots: int, thrift: int, held: str) -> Plan:
    units, workload = tuple(replace(unit, home=SSD) for unit in problem.units), problem.workload
    chunk_elements, state_slots = state_buffers(problem, thrift)
    every = tuple(index for index, unit in enumerate(units) if unit.update_elements)
    grouping = workload.grouping
    plan = Plan(
        serves=True,
        rule=problem.rule,
        own_rule=problem.own_rule,
        compute_dtype=problem.compute_dtype,
        separate_device=False,
        units=units,
        num_blocks=sum(form.home == SSD for form in problem.forms),
        tied=False,
        batch=BatchShape(
            sequence_length=workload.sequence_length,
            tokens_per_step=workload.tokens_per_step,
            micro_batch_sequences=0,
            num_micro_batches=0,
            hidden_size_bytes=0,
            loss_chunk_tokens=0,
        ),
        host_slots=min(len(units), slots),
        device_slots=0,
        prefetch=0,
        compute_threads=0,
        stash=Stash(tiers=(), slots=0, kept=(), kept_bytes=(), skipped=(), operators=()),
        gradients=Gradients(
            dtype=problem.gradient_dtype or problem.compute_dtype,
            held=held,
            slots=2 if slots > _HOST_SLOTS[-1] else 1,
            accumulate=False,
        ),
        updates=Updates(
            policy="deferred" if problem.clips else "immediate",
            late_units=every if problem.clips else (),
            checkpoint_every=1,
            chunk_elements=chunk_elements,
            state_slots=state_slots,
            resident_states=(),
            threads=max(1, problem.allowance.cores),
        ),
    )
    return with_serving_footprint(with_grouping(plan, grouping) if grouping else plan, problem.allowance)


def _filled(problem: Problem, plan: Plan) -> Plan:
    """Return `plan` with the rest of host memory used."""
    spare = plan.results.allowed_bytes["host"] - plan.peak("host")
    slot_bytes = buffer_groups(plan)["host_weights"].total_bytes // plan.host_slots
    more = max(0, min(len(plan.units) - plan.host_slots, spare // slot_bytes))
    plan = replace(plan, host_slots=plan.host_slots + more)
    if plan.updates.policy == "deferred" and plan.host_slots >= len(plan.units):
        plan = with_resident_states(plan, spare - more * slot_bytes)
    return with_serving_footprint(plan, problem.allowance)
