"""A plan that exists already: another run's, or the output of `headrace plan --json`.

Two runs of one command may get different plans. A plan that fits into today's free memory need not fit tomorrow, and libraries
take a mebibyte or two more or less in each process. Rows per micro-batch, tokens per chunk of the loss and threads of compute
decide the order of sums. So runs agree bit for bit only under the same plan.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.plan.forecast.footprint import runtime_row, with_footprint
from headrace.plan.search.problem import Problem
from headrace.plan.search.space import with_groups
from headrace.plan.value.plan import Plan
from headrace.plan.value.refusal import refusal
from headrace.plan.value.replaying import operators_of
from headrace.plan.value.results import PLAN_NAME
from headrace.terms.errors import ConfigError
from headrace.terms.json_text import parse_json


def load_plan(path: Path) -> Plan:
    """Return the plan of a run directory, of its `plan.json`, or of what `headrace plan --json` printed.

    Raises:
        ConfigError: no such file, not JSON, or no plan (of this version).
    """
    file = path / PLAN_NAME if path.is_dir() else path
    advice = "give a run directory with a plan.json, or a file with the output of 'headrace plan --json'"
    try:
        values: Any = parse_json(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"plan {file}: cannot be read ({error.strerror}); {advice}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"plan {file}: not JSON ({error}); {advice}") from error
    if isinstance(values, dict) and "fits" in values:
        if not values["fits"]:
            raise ConfigError(f"plan {file}: says that the model does not fit; {advice} that fits")
        values = values.get("plan")
    try:
        plan = Plan.from_json(values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"plan {file}: no plan of this version of headrace ({error}); {advice}") from error
    return plan


def lengths_in_plan(plan: str | Path | None, tokens: int | None, length: int | None) -> tuple[int | None, int | None]:
    """Return tokens per step and sequence length: what is not given is the plan's, if there is one.

    Raises:
        ConfigError: `plan` names no plan.
    """
    if not plan:
        return tokens, length
    batch = load_plan(Path(plan)).batch
    return tokens or batch.tokens_per_step, length or batch.sequence_length


def adopted(plan: Plan, problem: Problem) -> Plan:
    """Return `plan` for this run of `problem`: its choices unchanged, with the footprint that they have in this process.

    Raises:
        ConfigError: it was made for another model, another step or other hardware; the message names every difference.
        PlanInfeasible: it takes more than the budgets allow.
    """
    if differences := list(_differences(plan, problem)):
        raise ConfigError(f"plan: it is for another run: {'; '.join(differences)}; give the plan of a run like this, or none")
    if damaged := ", ".join(_damaged(plan, problem)):
        raise ConfigError(f"plan: no planner made this: {damaged}; give a plan as it was written, or none")
    costs = problem.costs_of(plan.batch.micro_batch_sequences)
    if plan.stash.operators != operators_of(costs):
        raise ConfigError(
            "plan: it is for blocks with other operators (compile_blocks, liger, or another version of transformers or "
            "torch). Give the plan of a run like this, or none"
        )
    if (rows := plan.batch.head_rows) != costs.head_rows:
        raise ConfigError(
            f"plan: its loss takes {rows or 'all'} rows of the head at a time, and {costs.head_rows or 'all'} here; "
            "give the plan of a run like this, or none"
        )
    allowance = problem.allowance
    plan = with_footprint(
        with_groups(plan, problem), costs, replace(allowance, runtime_bytes=runtime_row(plan, allowance.runtime_bytes))
    )
    if not plan.fits:
        raise refusal(plan, "the plan that was given needs {}", "leave the plan to the planner")
    return plan


def refuse_other_bits(plan: Plan, now: Plan) -> None:
    """Refuse a plan with which a run under the plan `now` may not go on: it would change its numbers, or how its state is cut.

    Raises:
        ConfigError: the message names every difference.
    """
    found = {
        "rows of a micro-batch": (plan.batch.micro_batch_sequences, now.batch.micro_batch_sequences),
        "tokens of a chunk of the loss": (plan.batch.loss_chunk_tokens, now.batch.loss_chunk_tokens),
        "rows of the head": (plan.batch.head_rows, now.batch.head_rows),
        "threads of compute": (plan.compute_threads, now.compute_threads),
        "gradient_sum": (plan.gradients.order, now.gradients.order),
        "chunk_elements": (plan.updates.chunk_elements, now.updates.chunk_elements),
        "checkpoint_every": (plan.updates.checkpoint_every, now.updates.checkpoint_every),
        "experts as parts": (_words(plan.experts is not None), _words(now.experts is not None)),
    }
    if differ := [f"{name} {then} in the plan, {here} in the run" for name, (then, here) in found.items() if then != here]:
        raise ConfigError(f"plan: a run cannot go on under it: {'; '.join(differ)}; give one that differs in nothing of these")


def _differences(plan: Plan, problem: Problem) -> Iterator[str]:
    """Yield the ways in which this run differs from what the plan was made for."""
    workload, cores = problem.workload, problem.allowance.cores
    batch, updates = plan.batch, plan.updates
    asked = workload.checkpoint_every or updates.checkpoint_every  # at most so many steps: more frequent ones are as good
    threads = max(plan.compute_threads, updates.threads)
    made_for_and_found = {
        "parameters": (plan.num_parameters, sum(unit.num_parameters for unit in problem.units)),
        "units": (plan.units, problem.units),
        "compute_dtype": (plan.compute_dtype, problem.compute_dtype),
        "gradient_dtype": (plan.gradients.dtype, problem.gradient_dtype or problem.compute_dtype),
        "rule": (plan.rule.name, problem.rule.name),
        "tokens_per_step": (batch.tokens_per_step, workload.tokens_per_step),
        "sequence_length": (batch.sequence_length, workload.sequence_length),
        "gradient_sum": (plan.gradients.order, workload.gradient_sum),
        "passes of the head": (batch.head_passes, workload.head_passes),
        "checkpoint_every": (updates.checkpoint_every, min(asked, updates.checkpoint_every)),
        "device memory of its own": (_words(plan.separate_device), _words(problem.separate_device)),
        "chunk_elements": (updates.chunk_elements, problem.allowance.chunk_elements or updates.chunk_elements),
    }
    for name, (made_for, found) in made_for_and_found.items():
        if made_for != found:
            yield f"{name} differ" if name == "units" else f"{name} {made_for} in the plan, {found} here"
    if plan.embedding is not None and not (problem.has_rows and plan.embedding == problem.embedding):
        yield "rows of the embedding are read one by one in the plan, and cannot be here"
    if plan.visiting_head not in (None, problem.head_home if problem.head_may_visit else None):
        yield "the head has its memory for the loss only in the plan, and cannot here"
    if plan.head_slot_bytes not in (None, problem.head_range_bytes if problem.head_may_come_by_ranges else None):
        yield "the head comes range by range in the plan, and cannot here"
    if plan.parts is not None and plan.parts != problem.cuts():
        yield "blocks come in parts in the plan, and cannot here"
    if plan.hosted and problem.place is not None:
        yield "hidden states wait in host memory in the plan, and stages hand them on"
    if updates.policy not in (*problem.policies, "speculative"):
        yield "clipping no in the plan, yes here"
    if threads > cores:
        yield f"{threads} threads in the plan, {cores} cores here"


def _damaged(plan: Plan, problem: Problem) -> Iterator[str]:
    """Yield properties that no plan has: the file was edited."""
    batch, stash, updates = plan.batch, plan.stash, plan.updates
    least = {
        "micro_batch_sequences": (batch.micro_batch_sequences, 1),
        "loss_chunk_tokens": (batch.loss_chunk_tokens, 1),
        "checkpoint_every": (updates.checkpoint_every, 1),
        "prefetch": (plan.prefetch, 0),
        "host_slots": (plan.host_slots, min(plan.num_blocks, plan.prefetch + 1)),
        "chunk_elements": (updates.chunk_elements, 1),
        "state_slots": (updates.state_slots, 1),
        "gradient_slots": (plan.gradients.slots, 1),
        "stash_slots": (stash.slots, 0),
        "compute_threads": (plan.compute_threads, 1),
        "update_threads": (updates.threads, 1),
    }
    yield from (f"{name} {found}" for name, (found, value) in least.items() if found < value)
    if batch.num_micro_batches != -(-problem.workload.sequences // max(1, batch.micro_batch_sequences)):
        yield f"{batch.num_micro_batches} micro-batches of {batch.micro_batch_sequences} rows"
    of_blocks = {"stash_tiers": stash.tiers, "kept": stash.kept, "kept_bytes": stash.kept_bytes}
    for name, found in (of_blocks | {"skipped": stash.skipped, "operators": stash.operators}).items():
        if len(found) != plan.num_blocks:
            yield f"{name} of {len(found)} blocks, where there are {plan.num_blocks}"
            return
    yield from (f"block inputs on {tier!r}" for tier in sorted(set(stash.tiers) - set(problem.homes)))
    if plan.hosted and (min(plan.hosted.coming, plan.hosted.going) < 1 or "device" in stash.tiers):
        yield "hidden states in host memory without slots, or beside inputs on the device"
    for block, names in enumerate(stash.operators):
        if not {*stash.kept[block], *stash.skipped[block]} <= set(range(len(names))):
            yield f"kept or skipped operators of block {block + 1} beyond its {len(names)}"
            return


def _words(value: bool) -> str:
    return "yes" if value else "no"
