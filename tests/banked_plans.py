"""Plans of generations in which experts come by themselves, whatever the planner would choose."""

from dataclasses import replace
from typing import Any

from headrace.generate.passes.generator import Generator
from headrace.generate.plan.plan import GenerationPlan
from headrace.plan.value.expert_plan import ExpertPlan


def with_banks(generator: Generator, plan: GenerationPlan, **how: Any) -> GenerationPlan:
    """Return the plan with experts that come by themselves; `how` they do: fields of an `ExpertPlan`."""
    source = generator.model.source.by_experts
    assert source is not None, "the architecture has experts"
    experts = ExpertPlan(figures=source.expert_figures, choices=plan.costs.choices, **{"in_round": 1, **how})
    slots = {"host_slots": 2, "device_slots": 2, "prefetch": 1}
    return replace(plan, units=source.figures, experts=experts, **slots)


def with_whole_blocks(generator: Generator, plan: GenerationPlan) -> GenerationPlan:
    """Return the plan with blocks that come whole."""
    return replace(plan, units=generator.model.source.figures, experts=None)
