"""A stage's own plan: the question about its blocks alone, and the answer in the numbers of the whole model (AxoNN).

The search sees a smaller model, whose ends may be away. Invariant: a plan that is placed has the buffers and peaks of the one
that was found.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.plan.search.problem import Problem
from headrace.plan.value.plan import Plan
from headrace.plan.value.stage_place import StagePlace
from headrace.terms.costs import ModelCosts
from headrace.terms.forms import AWAY, UnitFigures


def stage_problem(problem: Problem, place: StagePlace) -> Problem:
    """Return the part of `problem` that the stage at `place` has."""
    blocks = slice(place.blocks.start, place.blocks.stop)
    forms = (problem.forms[0], *problem.forms[blocks], *problem.forms[place.num_blocks + 1 :])

    def costs_of(rows: int) -> ModelCosts:
        costs = problem.costs_of(rows)
        own = costs.blocks[place.blocks.start - 1 : place.blocks.stop - 1]
        return replace(costs, blocks=own, epilogue_flops_per_token=costs.epilogue_flops_per_token * place.is_last)

    return replace(problem, forms=forms, costs_of=costs_of, place=place)


def placed(plan: Plan, place: StagePlace, units: Sequence[UnitFigures]) -> Plan:
    """Return a stage's `plan` in the numbers of the whole model, whose `units` are given; those of others are away."""
    count, before = plan.num_blocks, place.blocks.start - 1
    after = place.num_blocks - before - count
    stash, results, updates = plan.stash, plan.results, plan.updates

    def unit_of(unit: int) -> int:
        return unit if unit == 0 else unit + before if unit <= count else place.num_blocks + 1

    def by_block(values: Sequence[Any], nothing: Any) -> tuple[Any, ...]:
        return (*(nothing,) * before, *values, *(nothing,) * after) if values else ()

    own, flops = {unit_of(unit): figures for unit, figures in enumerate(plan.units)}, results.forward_flops
    return replace(
        plan,
        units=tuple(own.get(unit) or figures.away() for unit, figures in enumerate(units)),
        num_blocks=place.num_blocks,
        updates=replace(
            updates,
            late_units=tuple(map(unit_of, updates.late_units)),
            resident_states=tuple(map(unit_of, updates.resident_states)),
        ),
        stash=replace(
            stash,
            tiers=by_block(stash.tiers, AWAY),
            kept=by_block(stash.kept, ()),
            kept_bytes=by_block(stash.kept_bytes, 0),
            skipped=by_block(stash.skipped, ()),
            operators=by_block(stash.operators, ()),
        ),
        results=replace(
            results,
            forward_flops=(*flops[:1], *by_block(flops[1 : count + 1], 0.0), *flops[count + 1 :]),
            attention_flops=by_block(results.attention_flops, 0.0),
            spared_flops=by_block(results.spared_flops, 0.0),
        ),
    )
