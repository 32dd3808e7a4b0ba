"""A plan that was made before: of another run, or by `headrace plan --json`.

Two runs of one command may get different plans: one that fits in today's free memory need not fit tomorrow, and what libraries
take differs by a mebibyte or two from process to process. Rows per micro-batch, tokens per chunk of the loss and threads of
compute decide in which order sums are taken; so runs agree bit for bit only under the same plan.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.plan.base import Plan
from headrace.plan.footprint import with_footprint
from headrace.plan.placement import Problem, units_of
from headrace.spec.errors import ConfigError, PlanInfeasible
from headrace.spec.sizes import format_bytes

_FILE_OF_A_RUN = "plan.json"


def load_plan(path: Path) -> Plan:
    """Return the plan of a run directory, of its `plan.json`, or of what `headrace plan --json` printed.

    Raises:
        ConfigError: no such file, not JSON, or no plan (of this version).
    """
    file = path / _FILE_OF_A_RUN if path.is_dir() else path
    advice = "give a run directory with a plan.json, or a file with the output of 'headrace plan --json'"
    try:
        values: Any = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"plan {file}: cannot be read ({error.strerror}); {advice}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"plan {file}: not JSON ({error}); {advice}") from error
    if isinstance(values, dict) and "fits" in values:
        if not values["fits"]:
            raise ConfigError(f"plan {file}: says that the model does not fit; {advice} that fits")
        values = values.get("plan")
    try:
        return Plan.from_json(values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"plan {file}: no plan of this version of headrace ({error}); {advice}") from error


def adopted(plan: Plan, problem: Problem) -> Plan:
    """Return `plan` for this run of `problem`: its choices as they are, with the footprint that they have in this process.

    Raises:
        ConfigError: it is another model's or another step's, or was made for other hardware; names every difference.
        PlanInfeasible: it takes more than the budgets allow.
    """
    if differences := list(_differences(plan, problem)):
        raise ConfigError(f"plan: it is for another run: {'; '.join(differences)}; give the plan of a run like this, or none")
    plan = with_footprint(plan, problem.costs_of(plan.micro_batch_sequences), problem.allowance, runtime_of=plan)
    for tier, allowed in plan.allowed_bytes.items():
        if plan.peak(tier) > allowed:
            raise PlanInfeasible(
                f"{tier} memory: the plan that was given needs {format_bytes(plan.peak(tier))}, {format_bytes(allowed)} are "
                "allowed; allow more, or leave the plan to the planner",
                tier=tier,
                needed_bytes=plan.peak(tier),
                allowed_bytes=allowed,
            )
    return plan


def _differences(plan: Plan, problem: Problem) -> Iterator[str]:
    """Yield what the plan was made for and this run is not."""
    workload, cores = problem.workload, problem.allowance.cores
    threads = max(plan.compute_threads, plan.update_threads)
    made_for_and_found = {
        "parameters": (plan.num_parameters, sum(layout.num_parameters for layout in problem.layouts)),
        "units": (plan.units, units_of(problem)),
        "compute_dtype": (plan.compute_dtype, problem.compute_dtype),
        "gradient_dtype": (plan.gradient_dtype, problem.gradient_dtype or problem.compute_dtype),
        "moments": (plan.moments, problem.moments),
        "tokens_per_step": (plan.tokens_per_step, workload.tokens_per_step),
        "sequence_length": (plan.sequence_length, workload.sequence_length),
        "clipping": (_words(plan.update_policy != "immediate"), _words(problem.clips)),
        "checkpoint_every": (plan.checkpoint_every, workload.checkpoint_every or plan.checkpoint_every),
        "device memory of its own": (_words(plan.separate_device), _words(problem.separate_device)),
        "chunk_elements": (plan.chunk_elements, problem.allowance.chunk_elements or plan.chunk_elements),
    }
    for name, (made_for, found) in made_for_and_found.items():
        if made_for != found:
            yield f"{name} differ" if name == "units" else f"{name} {made_for} in the plan, {found} here"
    if threads > cores:
        yield f"{threads} threads in the plan, {cores} cores here"


def _words(value: bool) -> str:
    return "yes" if value else "no"
