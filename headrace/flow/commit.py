"""A step becomes durable: states that live in memory are written, then one record names everything that was."""

import time

from headrace.flow.state import Parts, StepState
from headrace.spec.events import Committed
from headrace.spec.program import Op


def commit(state: StepState, op: Op) -> None:
    """Write what lives only in memory, then the record; nothing if the step is no checkpoint.

    A skipped step changes no state, but its record does move on: data position, loss scale. Where updates run behind backward
    the verdict comes after the first writes, so a step without effect leaves those to be abandoned and commits nothing.
    """
    verdict, parts = state.verdict_of(op), state.parts
    if not verdict.durable or (verdict.void and state.plan.update_policy != "deferred"):
        return
    start = time.perf_counter()
    write_resident_states(parts)
    parts.store.commit(verdict.record(verdict))
    parts.sink(Committed(step=verdict.step, seconds=time.perf_counter() - start))


def write_resident_states(parts: Parts) -> None:
    """Write the states that live in host memory into the slot that is not committed."""
    plan = parts.plan
    tickets = []
    for unit in plan.resident_states:
        states = parts.buffers.resident_states[unit]
        for chunk in range(plan.num_chunks(unit)):
            tickets.append(parts.store.write_states(unit, chunk, states[plan.states_of_chunk(unit, chunk)]))
    for ticket in tickets:
        ticket.wait()
