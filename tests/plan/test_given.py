"""A run's own plan is taken as it is; what no planner made, or made for another run, is refused.

Run: pytest tests/plan/test_given.py
"""

from dataclasses import replace

import pytest
from test_search import costs_of, layouts, machine, problem
from tiers import sampled

from headrace.plan.search.given import adopted
from headrace.plan.search.problem import Problem
from headrace.plan.search.search import make_plan
from headrace.terms.costs import ModelCosts
from headrace.terms.errors import ConfigError, PlanInfeasible
from headrace.terms.forms import in_place_forms
from headrace.terms.sizes import MIB


def one_block(made: Problem) -> Problem:
    def costs(sequences: int) -> ModelCosts:
        found = costs_of(sequences)
        return replace(found, blocks=found.blocks[:1])

    ends = layouts()
    return replace(made, forms=in_place_forms((ends[0], ends[1], ends[-1]), 1, made.rule), costs_of=costs)


def checkpointed(made: Problem, checkpoint_every: int) -> Problem:
    return replace(made, workload=replace(made.workload, checkpoint_every=checkpoint_every))


@pytest.mark.parametrize("clip", sampled([False, True]))
@pytest.mark.parametrize("measured", sampled([False, True]))
def test_the_own_plan_of_a_model_of_one_block_is_taken(clip: bool, measured: bool) -> None:
    """It has one block in host memory and one read ahead: there is no second one to hold."""
    made = one_block(problem(400 * MIB, clip=clip))
    plan = make_plan(made, machine(made) if measured else None)
    assert plan.host_slots == plan.num_blocks == 1
    assert adopted(plan, made) == plan


@pytest.mark.parametrize("clip", sampled([False, True]))
def test_the_own_plan_is_taken_whatever_the_checkpoints(clip: bool) -> None:
    """Where updates do not wait for the norm every step is a checkpoint, whatever the configuration asks for."""
    made = checkpointed(problem(400 * MIB, clip=clip), 4)
    plan = make_plan(made)
    assert plan.updates.checkpoint_every == (1 if plan.updates.policy == "immediate" else 4)
    assert adopted(plan, made) == plan


def test_a_plan_with_other_checkpoints_is_refused_where_they_count() -> None:
    """They may be closer than was asked for, not further apart: that many steps would be lost."""
    made = problem(400 * MIB, clip=True)
    plan = make_plan(checkpointed(made, 4))
    assert plan.updates.checkpoint_every == 4
    with pytest.raises(ConfigError, match="checkpoint_every 4 in the plan, 2 here"):
        adopted(plan, checkpointed(made, 2))
    assert adopted(plan, checkpointed(made, 8)) == plan


def test_a_plan_for_which_the_ssds_lack_space_is_refused() -> None:
    made = problem(400 * MIB)
    plan = make_plan(made)
    enough = replace(made, allowance=replace(made.allowance, ssd_bytes=plan.peak("ssd")))
    assert adopted(plan, enough).results.allowed_bytes["ssd"] == plan.peak("ssd")
    short = replace(made, allowance=replace(made.allowance, ssd_bytes=plan.peak("ssd") - 1))
    with pytest.raises(PlanInfeasible, match=r"^ssd: the plan that was given needs") as caught:
        adopted(plan, short)
    assert caught.value.tier == "ssd"


def test_fewer_blocks_in_host_memory_than_are_read_ahead_are_refused() -> None:
    made = problem(400 * MIB)
    plan = make_plan(made)
    assert plan.prefetch > 0
    with pytest.raises(ConfigError, match=f"no planner made this: host_slots {plan.prefetch}"):
        adopted(replace(plan, host_slots=plan.prefetch), made)
