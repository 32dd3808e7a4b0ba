"""A plan with the same work in fewer operations, for the simulator: a very large step is cut more coarsely.

A unit's update is cut into fewer, larger chunks; micro-batches become fewer and larger; several blocks become one.
Floating-point operations, bytes and launches stay the same in all. Without this a step of 175B has a hundred thousand
operations. Buffers that hold a chunk or an input grow with it, so reads run further ahead than the engine's own buffers let
them. Invariant: bytes, operations and launches of a step stay the same.
"""

from dataclasses import replace
from itertools import groupby

from headrace.plan.value.choices import BatchShape
from headrace.plan.value.expert_plan import ExpertParts
from headrace.plan.value.plan import Plan, spread
from headrace.plan.value.results import Results
from headrace.terms.costs import touched
from headrace.terms.forms import merged
from headrace.terms.layout import UNIT_ALIGNMENT
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.sizes import round_up

# The coarsest cut: with fewer pieces per unit, reading, updating and writing one unit would no longer overlap.
_LEAST_CHUNKS = 4
_LEAST_MICRO_BATCHES = 4
_LEAST_BLOCKS = 12
_LEAST_STASH_SLOTS = 4
# Operations of a chunk (read, update, two writes), and of a micro-batch of a block (forward, stash, recall, backward).
_PER_CHUNK, _PER_MICRO_BATCH = 4, 4


def coarsened(plan: Plan, ceilings: Ceilings, most_operations: int) -> Plan:
    """Return a plan with the same work in fewer operations, or the plan itself if it has few."""
    chunks = sum(plan.num_chunks(unit) for unit in range(len(plan.units)))
    if _PER_CHUNK * chunks + _PER_MICRO_BATCH * plan.num_blocks * plan.batch.num_micro_batches <= most_operations:
        return plan
    plan = _merged(plan, ceilings, most_operations // (_PER_CHUNK * _LEAST_CHUNKS + _PER_MICRO_BATCH * _LEAST_MICRO_BATCHES))
    per_micro = _PER_MICRO_BATCH * plan.num_blocks
    least = max(_LEAST_MICRO_BATCHES, plan.stage.groups if plan.stage else 0)  # each group reads weights
    joined = max(1, plan.batch.num_micro_batches // max(least, most_operations // (3 * per_micro)))
    plan = _joined(plan, -(-plan.batch.num_micro_batches // joined), ceilings)
    left = most_operations - per_micro * plan.batch.num_micro_batches
    pieces = max(_LEAST_CHUNKS, left // (_PER_CHUNK * len(plan.units)))
    largest = max(unit.num_elements for unit in plan.units[1 : plan.num_blocks + 1])
    chunk_elements = max(plan.updates.chunk_elements, round_up(-(-largest // pieces), UNIT_ALIGNMENT))
    # Three buffers suffice to read, update and write at once. More of the enlarged ones would hold more than the plan does.
    slots = plan.updates.state_slots if chunk_elements == plan.updates.chunk_elements else min(plan.updates.state_slots, 3)
    return plan.with_updates(chunk_elements=chunk_elements, state_slots=slots)


def _merged(plan: Plan, ceilings: Ceilings, most_blocks: int) -> Plan:
    """Return a plan with few blocks: neighbouring blocks of one kind, whose inputs wait in one place, become one."""
    size = -(-plan.num_blocks // max(_LEAST_BLOCKS, most_blocks))
    if size == 1:
        return plan
    parted = plan.experts.figures.num_experts[1:] if plan.experts else (0,) * plan.num_blocks
    alike = [(tier, unit.kind, count > 0) for tier, unit, count in zip(plan.stash.tiers, plan.units[1:], parted, strict=False)]
    runs = [[block for block, _ in run] for _, run in groupby(enumerate(alike), key=lambda pair: pair[1])]
    groups = [run[start : start + size] for run in runs for start in range(0, len(run), size)]
    share = len(groups) / plan.num_blocks
    units = [merged([plan.units[block + 1] for block in group]) for group in groups]
    # Of the updated blocks, the same share as before has resident states (the first ones), and is late (evenly spread).
    updated = [index for index, unit in enumerate(units, start=1) if unit.update_elements]
    of_updated = len(updated) / max(1, sum(unit.update_elements > 0 for unit in plan.units[1 : plan.num_blocks + 1]))
    residents, late = (
        round(of_updated * sum(1 <= unit <= plan.num_blocks for unit in chosen))
        for chosen in (plan.updates.resident_states, plan.updates.late_units)
    )
    return replace(
        plan,
        num_blocks=len(groups),
        experts=_merged_experts(plan.experts, groups),
        parts=plan.parts.merged(groups) if plan.parts else None,
        units=(plan.units[0], *units, *plan.units[plan.num_blocks + 1 :]),
        host_slots=max(plan.prefetch + 1, round(plan.host_slots * share)),
        updates=replace(
            plan.updates,
            resident_states=(*updated[:residents], *_around(plan, plan.updates.resident_states, len(groups))),
            late_units=(
                *(updated[place - 1] for place in spread(late, len(updated))),
                *_around(plan, plan.updates.late_units, len(groups)),
            ),
        ),
        hosted=replace(plan.hosted, blocks=plan.num_blocks / len(groups)) if plan.hosted else None,
        stash=replace(
            plan.stash,
            tiers=tuple(plan.stash.tiers[group[0]] for group in groups),
            kept=((),) * len(groups),
            kept_bytes=tuple(
                sum(plan.stash.kept_bytes[block] for block in group) + (len(group) - 1) * plan.hidden_bytes for group in groups
            ),
        ),
        results=_merged_flops(plan.results, groups, launch_flops(plan, ceilings, 1)),
    )


def _merged_flops(results: Results, groups: list[list[int]], launches: float) -> Results:
    """Return what merged blocks compute: `launches` between two of them are not spared."""
    forward, spared = results.forward_flops, results.spared_flops
    merged_forward = (sum(forward[block + 1] for block in group) + (len(group) - 1) * launches for group in groups if forward)
    return replace(
        results,
        forward_flops=(*forward[:1], *merged_forward, *forward[sum(map(len, groups)) + 1 :]),
        spared_flops=tuple(sum(spared[block] for block in group) for group in groups if spared),
    )


def _merged_experts(experts: ExpertParts | None, groups: list[list[int]]) -> ExpertParts | None:
    """Return experts of merged blocks: as many as a block has, each as large as its place in all blocks of a group."""
    if experts is None:
        return None
    figures = experts.figures
    counts = [max(figures.num_experts[block + 1] for block in group) for group in groups]
    factor = sum(figures.num_experts) / max(1, sum(counts))
    larger = {
        name: round(getattr(figures, name) * factor) for name in ("elements", "stored_bytes", "num_parameters", "making_like")
    }
    sizes = [sum(stop - start for start, stop in runs) for runs in experts.commons]
    commons = [sum(sizes[block + 1] for block in group) for group in groups] if sizes else []
    figures = replace(figures, num_experts=(0, *counts, 0), **larger)
    runs = ((), *(((0, size),) if size else () for size in commons), ()) if sizes else ()
    return replace(experts, figures=figures, commons=runs, cached=round(experts.cached / factor))


def _joined_experts(experts: ExpertParts, batch: BatchShape, count: int) -> ExpertParts:
    """Return experts of `count` joined micro-batches. There may be fewer groups of these than a step has. Then experts are
    larger, so that as many bytes come.
    """
    most = max(experts.figures.num_experts)
    joined = replace(experts, together=max(1, round(experts.together * count / batch.num_micro_batches)))

    def visits(together: int, micros: int) -> float:
        tokens = round(batch.tokens_per_step * min(together, micros) / micros)
        return -(-micros // together) * touched(most, experts.choices, tokens)

    more = visits(experts.together, batch.num_micro_batches) / visits(joined.together, count)
    larger = {name: round(getattr(experts.figures, name) * more) for name in ("elements", "stored_bytes", "making_like")}
    return replace(joined, figures=replace(experts.figures, **larger))


def _around(plan: Plan, units: tuple[int, ...], num_blocks: int) -> tuple[int, ...]:
    """Return those of `units` that are no blocks, with the numbers that they have among `num_blocks` blocks."""
    return tuple(
        unit if unit == 0 else unit - plan.num_blocks + num_blocks for unit in units if not 1 <= unit <= plan.num_blocks
    )


def launch_flops(plan: Plan, ceilings: Ceilings, calls: float) -> float:
    """Return the operations of a block's forward that take as long as the launches of so many more calls of it.

    Forward and backward together count four times the forward, and their launches are two.
    """
    return calls * ceilings.launch_seconds * ceilings.matrix_flops_per_second(plan.compute_dtype) / 2


def _joined(plan: Plan, count: int, ceilings: Ceilings) -> Plan:
    """Return a plan with `count` larger micro-batches."""
    # Exactly the work of the whole step, also where the number is not divisible by `count`.
    factor = plan.batch.num_micro_batches / count
    # Joining saves launches. Their time is added again, as the FLOPs that compute could have done in it.
    launches = launch_flops(plan, ceilings, factor - 1)
    return replace(
        plan,
        batch=replace(plan.batch, num_micro_batches=count, hidden_size_bytes=round(plan.batch.hidden_size_bytes * factor)),
        experts=_joined_experts(plan.experts, plan.batch, count) if plan.experts else None,
        parts=replace(plan.parts, times=plan.parts.times * factor) if plan.parts else None,
        stash=replace(
            plan.stash,
            # As many bytes are read early.
            slots=max(_LEAST_STASH_SLOTS, 2 + round((plan.stash.slots - 2) / factor)) if plan.batch.pages else plan.stash.slots,
            kept_bytes=tuple(round(size * factor) for size in plan.stash.kept_bytes),
        ),
        results=replace(
            plan.results,
            forward_flops=tuple(flops * factor + launches for flops in plan.results.forward_flops),
            spared_flops=tuple(flops * factor for flops in plan.results.spared_flops),
            epilogue_flops=plan.results.epilogue_flops * factor + launches * 2 / 3,
        ),
    )
