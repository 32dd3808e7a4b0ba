"""One pass of a generation. Its program (generate/plan/schedule.py) lists operations; here is what each of its verbs does.

The interpreters are those of a step, so reading ahead, copies and compute overlap, and both interpreters give the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from headrace.flow.run.execute import Interpreter, ProgramRun
from headrace.flow.weights.weights import WEIGHT_VERBS, load_residents
from headrace.generate.passes.buffers import GenerationBuffers
from headrace.generate.passes.expert_flow import ExpertFlow
from headrace.generate.passes.prompts_on_their_way import PromptOnItsWay
from headrace.generate.passes.seat_caches import SeatCache
from headrace.generate.passes.sources import GenerationSource
from headrace.generate.plan.plan import GenerationPlan
from headrace.machine.protocol import Machine
from headrace.model import Chain
from headrace.model.seats.seats import Seat, Seated, parts_of_prompt
from headrace.terms.lanes import Lane
from headrace.terms.program import Op, Pool, Program, Verb


@dataclass(frozen=True)
class Pass:
    """What the operations of passes share. `seats` are those of this pass, by their number in operations. `caches` are the
    parts of their caches that lie elsewhere; None for a seat whose cache stays where it is computed.

    `prompts` are those of which something is kept. `experts` brings experts that come by themselves; operations with a `part`
    belong to these.
    """

    plan: GenerationPlan
    chain: Chain
    machine: Machine
    source: GenerationSource
    buffers: GenerationBuffers
    seats: Sequence[Seated] = ()
    experts: ExpertFlow | None = None
    caches: Sequence[SeatCache | None] = ()
    prompts: Mapping[Seated, PromptOnItsWay] = field(default_factory=dict)


def run_pass(program: Program, state: Pass, interpreter: Interpreter, number: int) -> ProgramRun:
    """Run one pass. On return all its seats have taken their turn; what the next pass needs is being fetched."""

    def perform(op: Op) -> None:
        with state.chain.arithmetic() if op.lane is Lane.COMPUTE else nullcontext():
            if op.part >= 0 and state.experts is not None:
                EXPERT_HANDLERS[op.verb](state.experts, op)
                if op.verb is Verb.FORWARD and _ends_block(op):
                    for seat in state.seats:
                        _note_passed(state, seat, op.unit)
            else:
                HANDLERS[op.verb](state, op)

    with torch.no_grad():
        return interpreter.run(program, perform, number)


def bind_residents(state: Pass) -> None:
    """Bring prologue and epilogue to where they stay, and bind them."""
    load_residents(state)
    for unit, weights in state.buffers.residents.items():
        state.chain.bind(unit, weights, None, as_loaded=True)


def _query(state: Pass, op: Op) -> None:
    seat, chain, cache = state.seats[op.micro], state.chain, _cache(state, op)
    assert cache is not None, "the host attends to what a seat has there"

    def run() -> None:
        assert seat.hidden is not None, "a seat of a pass is parked"
        seat.hidden = chain.block(op.unit - 1, seat.hidden, seat.calls[op.unit - 1]).hidden

    chain.bind(op.unit, state.buffers.computed(op.unit, op), None, as_loaded=True)
    try:
        cache.query(op, chain.runner.blocks[op.unit - 1], run)
    finally:
        chain.release(op.unit)


def _query_out(state: Pass, op: Op) -> None:
    if (cache := _cache(state, op)) is not None:
        cache.query_out(op, state.machine)


def _attend(state: Pass, op: Op) -> None:
    if (cache := _cache(state, op)) is not None:
        cache.attend(op)


def _result_in(state: Pass, op: Op) -> None:
    if (cache := _cache(state, op)) is not None:
        cache.result_in(op, state.machine)


def _forward(state: Pass, op: Op) -> None:
    seat, chain, cache = state.seats[op.micro], state.chain, _cache(state, op)
    assert seat.hidden is not None, "a seat of a pass is parked"
    block = chain.runner.blocks[op.unit - 1]
    chain.bind(op.unit, state.buffers.computed(op.unit, op), None, as_loaded=True)
    if state.experts is not None and state.experts.plan.has(op.unit):
        assert isinstance(seat, Seat), "it can wait within a block"
        with cache.lent(op, block) if cache is not None else nullcontext():  # attention comes before experts
            state.experts.enter(op.unit, seat)
        return
    try:
        if cache is not None and cache.is_within(op.unit):
            cache.leave(op.unit)
            return
        with cache.together(op) if cache is not None else nullcontext():
            for number, part in enumerate(parts_of_prompt(seat)):
                assert part.hidden is not None, "a seat of a pass is parked"
                with cache.lent(op, block) if cache is not None else nullcontext():
                    part.hidden = chain.block(op.unit - 1, part.hidden, part.calls[op.unit - 1]).hidden
                _note_passed(state, seat, op.unit, number, cache.memory(op) if cache is not None else None)
    finally:
        chain.release(op.unit)


def _note_passed(state: Pass, seat: Seated, unit: int, number: int = 0, memory: torch.Tensor | None = None) -> None:
    """Note that a chunk of a seat's prompt, of which something is kept, has passed a block; `memory` has its tokens."""
    if (prompt := state.prompts.get(seat)) is not None:
        prompt.passed(unit, number, parts_of_prompt(seat)[number].calls[unit - 1], memory)


def _recompute(state: Pass, op: Op) -> None:
    """Make keys and values of the inputs that stand for them in a seat's cache."""
    chain, cache = state.chain, _cache(state, op)
    if cache is None:
        return
    chain.bind(op.unit, state.buffers.computed(op.unit, op), None, as_loaded=True)
    try:
        cache.recompute(op, partial(chain.block, op.unit - 1))
    finally:
        chain.release(op.unit)


def _cache(state: Pass, op: Op) -> SeatCache | None:
    return state.caches[op.micro] if state.caches else None


def _cache_read(state: Pass, op: Op) -> None:
    if (cache := _cache(state, op)) is not None:
        cache.read(op)


def _cache_in(state: Pass, op: Op) -> None:
    if (cache := _cache(state, op)) is not None:
        cache.bring_in(op, state.machine)


def _cache_out(state: Pass, op: Op) -> None:
    if (cache := _cache(state, op)) is not None:
        cache.bring_out(op, state.machine)


def _cache_write(state: Pass, op: Op) -> None:
    if (cache := _cache(state, op)) is not None:
        cache.write(op)


def _turn(state: Pass, op: Op) -> None:
    state.seats[op.micro].turn()


def _route(state: Pass, op: Op) -> None:
    assert state.experts is not None, "something is routed to them"
    state.experts.route(op)


def _ends_block(op: Op) -> bool:
    return op.slot(Pool.EXPERTS) < 0 and op.slot(Pool.DEVICE_EXPERTS) < 0


def _go_on(experts: ExpertFlow, op: Op) -> None:
    """Compute a round of experts; a round without a slot ends the block."""
    if _ends_block(op):
        experts.leave(op)
    else:
        experts.go_on(op)


HANDLERS: Mapping[Verb, Callable[[Any, Op], None]] = {
    **WEIGHT_VERBS,
    Verb.FORWARD: _forward,
    Verb.RECOMPUTE: _recompute,
    Verb.ROUTE: _route,
    Verb.QUERY: _query,
    Verb.QUERY_OUT: _query_out,
    Verb.ATTEND: _attend,
    Verb.RESULT_IN: _result_in,
    Verb.CACHE_READ: _cache_read,
    Verb.CACHE_IN: _cache_in,
    Verb.CACHE_OUT: _cache_out,
    Verb.CACHE_WRITE: _cache_write,
    Verb.TURN: _turn,
}
EXPERT_HANDLERS: Mapping[Verb, Callable[[ExpertFlow, Op], None]] = {
    Verb.FETCH: lambda flow, op: flow.loads.fetch(op),
    Verb.UPLOAD: lambda flow, op: flow.loads.upload(op),
    Verb.MAKE: lambda flow, op: flow.loads.make(op),
    Verb.FORWARD: _go_on,
}
