"""A step becomes durable: one record names everything that was written."""

import time

from headrace.flow.step.step_state import StepState
from headrace.terms.events import Committed
from headrace.terms.program import Op


def commit(state: StepState, op: Op) -> None:
    """Write the record; do nothing if the step is no checkpoint.

    A skipped step changes no state, but its record does move on: data position, loss scale. Where updates run behind backward
    the verdict comes after the first writes; such a step leaves its writes to be abandoned, and commits nothing.
    """
    verdict, parts = state.verdict_of(op), state.parts
    if not verdict.durable or (verdict.void and state.plan.updates.policy != "deferred"):
        return
    start = time.perf_counter()
    parts.commit(verdict)
    parts.sink(Committed(step=verdict.step, seconds=time.perf_counter() - start))
