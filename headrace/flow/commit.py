"""A step becomes durable: states that live in memory are written, then one record names everything that was."""

import time

from headrace.flow.step_state import Parts, StepState
from headrace.terms.events import Committed, OpDone
from headrace.terms.families import STATES
from headrace.terms.program import Lane, Op, Verb


def commit(state: StepState, op: Op) -> None:
    """Write what lives only in memory, then the record; nothing if the step is no checkpoint.

    A skipped step changes no state, but its record does move on: data position, loss scale. Where updates run behind backward
    the verdict comes after the first writes, so a step without effect leaves those to be abandoned and commits nothing.
    """
    verdict, parts = state.verdict_of(op), state.parts
    if not verdict.durable or (verdict.void and state.plan.update_policy != "deferred"):
        return
    start = time.perf_counter()
    written = write_resident_states(parts)
    if written:
        _account(parts, state.verdict.step, start, written)
    parts.store.commit(verdict.record(verdict))
    parts.sink(Committed(step=verdict.step, seconds=time.perf_counter() - start))


def _account(parts: Parts, step: int, start: float, written_bytes: int) -> None:
    """Tell of what a commit writes as of a lane's operation: it is the drives' work, of which the commit is only the end."""
    parts.sink(
        OpDone(
            step=step,
            label="write-states resident",
            verb=Verb.WRITE_STATES,
            lane=Lane.SSD_WRITE,
            unit=-1,
            micro=-1,
            chunk=-1,
            start_seconds=start,
            stop_seconds=time.perf_counter(),
            bytes=written_bytes,
        )
    )


def write_resident_states(parts: Parts) -> int:
    """Write the states that live in host memory into the slot that is not committed, and return how many bytes they are."""
    plan = parts.plan
    tickets = []
    for unit in plan.resident_states:
        states = parts.buffers.resident_states[unit]
        for chunk in range(plan.num_chunks(unit)):
            tickets.append(parts.store.write(unit, STATES, chunk, states[plan.states_of_chunk(unit, chunk)]))
    for ticket in tickets:
        ticket.wait()
    return sum(plan.state_bytes(unit) for unit in plan.resident_states)
