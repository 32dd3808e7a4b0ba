"""One pass of a generation. Its program (generate/schedule.py) lists operations; here is what each of its verbs does.

The interpreters are those of a step, so reading ahead, copies and compute overlap, and both interpreters give the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from headrace.flow.execute import Interpreter, Run
from headrace.generate.buffers import GenerationBuffers
from headrace.generate.expert_flow import ExpertFlow
from headrace.generate.plan import GenerationPlan
from headrace.generate.seat_caches import SeatCache
from headrace.generate.sources import WeightSource
from headrace.machine.host_memory import Bytes, huge_page_buffer
from headrace.machine.protocol import Machine
from headrace.model import Chain
from headrace.model.packed import PackedBlocks, PackedProducts
from headrace.model.seats import Seat, Seated
from headrace.terms.lanes import Lane
from headrace.terms.program import Op, Pool, Program, Verb
from headrace.terms.sizes import PAGE_BYTES, round_up


@dataclass(frozen=True)
class Pass:
    """What the operations of passes share. `seats` are those of this pass, by their number in operations. `caches` are the
    parts of their caches that lie elsewhere; None for a seat whose cache stays where it is computed.

    `packed` has the weights that are multiplied packed, None where the plan has none. `experts` brings experts that come by
    themselves; operations with a `part` belong to these.
    """

    plan: GenerationPlan
    chain: Chain
    machine: Machine
    source: WeightSource
    buffers: GenerationBuffers
    seats: Sequence[Seated] = ()
    experts: ExpertFlow | None = None
    packed: PackedBlocks | None = None
    caches: Sequence[SeatCache | None] = ()


def run_pass(program: Program, state: Pass, interpreter: Interpreter, number: int) -> Run:
    """Run one pass. On return all its seats have taken their turn; what the next pass needs is being fetched."""

    def perform(op: Op) -> None:
        with state.chain.arithmetic() if op.lane is Lane.COMPUTE else nullcontext():
            if op.part >= 0 and state.experts is not None:
                EXPERT_HANDLERS[op.verb](state.experts, op)
            else:
                HANDLERS[op.verb](state, op)

    with torch.no_grad():
        return interpreter.run(program, perform, number)


def load_residents(state: Pass) -> None:
    """Bring prologue and epilogue to where they stay, and bind them."""
    plan, buffers, source = state.plan, state.buffers, state.source
    source.read_trained(buffers.trained)
    for unit, into in buffers.residents.items():
        figures = plan.units[unit]
        stored = huge_page_buffer(round_up(plan.stored_bytes(unit), PAGE_BYTES))[: plan.stored_bytes(unit)]
        source.read(unit, stored)
        read = torch.from_numpy(stored)
        if figures.is_made:
            made = torch.empty(figures.num_elements, dtype=buffers.dtype) if plan.separate_device else into
            trained = source.trained.get(unit)
            source.make(unit, read, None if trained is None else torch.from_numpy(trained).view(torch.float32), made)
        else:
            made = read.view(buffers.dtype)
        if made is not into:
            into.copy_(made)
        state.chain.bind(unit, into, None, as_loaded=True)


def _fetch(state: Pass, op: Op) -> None:
    state.source.read(op.unit, state.buffers.stored(op.unit, op.slot(Pool.HOST_WEIGHTS)))


def _upload(state: Pass, op: Op) -> None:
    """Copy a block's weights to the device, or a page of them; if they are made there, copy their sources."""
    buffers, unit, sent = state.buffers, op.unit, op.slot(Pool.SOURCES)
    stored = buffers.stored(unit, op.slot(Pool.HOST_WEIGHTS))
    parts: list[tuple[torch.Tensor, Bytes]] = []
    if sent < 0 or op.slot(Pool.DEVICE_WEIGHTS) >= 0:
        parts.append((buffers.computed(unit, op).view(torch.uint8), stored))
    if sent >= 0:
        sources = [trained] if (trained := state.source.trained.get(unit)) is not None else []
        if state.plan.units[unit].stored_bytes is not None:
            sources.insert(0, stored)
        start = 0
        for each in sources:
            parts.append((buffers.sources[sent][start : start + each.size], each))
            start += each.size
    page = state.plan.page_bytes(unit)
    left, right = (op.chunk * page, (op.chunk + 1) * page) if op.chunk >= 0 else (0, state.plan.sent_bytes(unit))
    for into, source in parts:
        begin, end = max(0, left), min(source.size, right)
        if begin < end:
            state.machine.copy(into[begin:end], torch.from_numpy(source[begin:end]))
        left, right = left - source.size, right - source.size


def _make(state: Pass, op: Op) -> None:
    """Make the weights that compute reads from what is in host memory or was sent to the device."""
    buffers, unit, sent = state.buffers, op.unit, op.slot(Pool.SOURCES)
    into, figures = buffers.computed(unit, op), state.plan.units[unit]
    stored: torch.Tensor | None
    trained: torch.Tensor | None = None
    if sent < 0:
        stored = torch.from_numpy(buffers.stored(unit, op.slot(Pool.HOST_WEIGHTS)))
        if (held := state.source.trained.get(unit)) is not None:
            trained = torch.from_numpy(held)
    else:
        coded, whole = figures.stored_bytes or 0, buffers.sources[sent]
        stored = whole[:coded] if coded else None
        trained = whole[coded : coded + state.plan.completing_bytes(unit)] if figures.is_completed else None
    state.source.make(unit, stored, None if trained is None else trained.view(torch.float32), into)
    if state.packed is not None and stored is not None and figures.packed_bytes:
        state.source.pack(unit, stored, into, state.packed)


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
    if state.experts is not None and state.experts.has(op.unit):
        assert isinstance(seat, Seat), "it can wait within a block"
        with cache.lent(op, block) if cache is not None else nullcontext():  # attention comes before experts
            state.experts.enter(op.unit, seat)
        return
    try:
        if cache is not None and cache.is_within(op.unit):
            cache.leave(op.unit)
            return
        packed = PackedProducts(state.packed) if state.packed is not None else nullcontext()
        with packed, cache.lent(op, block) if cache is not None else nullcontext():
            seat.hidden = chain.block(op.unit - 1, seat.hidden, seat.calls[op.unit - 1]).hidden
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


def _go_on(experts: ExpertFlow, op: Op) -> None:
    """Compute a round of experts; a round without a slot ends the block."""
    if op.slot(Pool.EXPERTS) < 0 and op.slot(Pool.DEVICE_EXPERTS) < 0:
        experts.leave(op)
    else:
        experts.go_on(op)


HANDLERS: Mapping[Verb, Callable[[Any, Op], None]] = {
    Verb.FETCH: _fetch,
    Verb.UPLOAD: _upload,
    Verb.MAKE: _make,
    Verb.FORWARD: _forward,
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
    Verb.FETCH: ExpertFlow.fetch,
    Verb.UPLOAD: ExpertFlow.upload,
    Verb.MAKE: ExpertFlow.make,
    Verb.FORWARD: _go_on,
}
