"""What would make a generation faster, or fit: weights in four bits, more memory, fewer rows, smaller caches.

Invariant: each way that is named was planned as `headrace plan` would plan it with these options, and is faster.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from headrace.generate.plan.pass_forecast import FasterWay
from headrace.generate.plan.plan import GenerationPlan
from headrace.terms.errors import ConfigError, PlanInfeasible
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.sizes import format_bytes

# The code that is offered, and for caches.
CODE, CACHE_CODE = "int4", "int8"
# A way is named if its tokens come so many times as fast.
_LEAST_GAIN = 1.1

# Plans with so many rows, unless the options say, and with other options or weights that `compress` codes.
Planned = Callable[..., GenerationPlan]


def with_faster_ways(plan: GenerationPlan, options: GenerateOptions, planned: Planned, *, is_coded: bool) -> GenerationPlan:
    """Return `plan` with the ways that are faster, the fastest first. `is_coded`: its weights are in a code already."""
    found = []
    if plan.forecast is not None:
        for change, given in _ways(plan, options, is_coded=is_coded):
            with suppress(PlanInfeasible, ConfigError):  # some codes cannot hold this model
                other = planned(plan.rows, **given).forecast
                gain = plan.forecast.pass_seconds / other.pass_seconds if other is not None else 0
                if other is not None and gain >= _LEAST_GAIN:
                    found.append((gain, FasterWay(change=change, options=given, forecast=other)))
    ways = tuple(way for _, way in sorted(found, key=lambda pair: -pair[0]))
    return replace(plan, forecast=replace(plan.forecast, instead=ways)) if plan.forecast and ways else plan


def _ways(plan: GenerationPlan, options: GenerateOptions, *, is_coded: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    forecast, host = plan.forecast, plan.results.allowed_bytes.get("host")
    if not is_coded:
        yield f"--compress {CODE}, as headrace compress --to {CODE} writes it", {"compress": CODE}
    if options.cache_dtype is None and plan.caches.moves:
        yield f"--cache-dtype {CACHE_CODE}", {"cache_dtype": CACHE_CODE}
    if plan.rows > 1 and options.rows is not None:
        yield f"--rows {max(1, plan.rows // 2)}", {"rows": max(1, plan.rows // 2)}
    if forecast is not None and forecast.read_bytes and host:
        yield f"twice the host memory ({format_bytes(2 * host)})", {"host_memory": 2 * host}


def ways_that_fit(options: GenerateOptions, planned: Planned, *, is_coded: bool) -> str:
    """Return what would fit instead of what does not, for a message; "" where nothing was found."""
    tries: list[tuple[str, dict[str, Any]]] = [] if is_coded else [(f"--compress {CODE}", {"compress": CODE})]
    tries += [] if options.cache_dtype else [(f"--cache-dtype {CACHE_CODE}", {"cache_dtype": CACHE_CODE})]
    tries += [("--rows 1", {"rows": 1})] if (options.rows or 1) > 1 else []
    found = []
    for change, given in tries:
        with suppress(PlanInfeasible, ConfigError):
            planned(options.rows or 1, **given)
            found.append(change)
    return f"; it fits with {' or '.join(found)}" if found else ""
