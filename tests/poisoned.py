"""Fills what is released with NaN: buffers of weights, states, gradients and stashed inputs, once nothing reads them again.

From a program's ledger follows between which two writes of a whole buffer which operations touch it. The last of these to end
fills it, before whoever writes it next may begin. So what reads a buffer without having said so computes with NaN.
"""

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.compress.block_weights import WholeBlock
from headrace.flow.run.execute import Interpreter
from headrace.flow.weights.weights import WeightBuffers
from headrace.plan.schedules.ledger import Ledger
from headrace.terms.lanes import Lane
from headrace.terms.program import SLOT_MASK, WHOLE_MASK, Op, Pool, Program

# By pool: how its buffers are found. Each is written whole before it is used again.
_PLACES: dict[Pool, Callable[[Any], Any]] = {
    Pool.HOST_WEIGHTS: lambda buffers: buffers.host_weights,
    Pool.DEVICE_WEIGHTS: lambda buffers: buffers._device_weights,
    Pool.STATES: lambda buffers: buffers.states,
    Pool.STASH: lambda buffers: buffers.stash,
    Pool.SOURCES: lambda buffers: buffers.sources,
    Pool.DEVICE_STATES: lambda buffers: buffers.device_states,
    Pool.EXPERTS: lambda buffers: buffers.experts,
    Pool.DEVICE_EXPERTS: lambda buffers: buffers.device_experts,
}
_OF_EXPERTS = frozenset({Pool.EXPERTS, Pool.DEVICE_EXPERTS})
# Updates change what lies in these: only what brings a chunk writes all of it.
_BROUGHT_BY = {Pool.STATES: Lane.SSD_READ, Pool.DEVICE_STATES: Lane.HOST_TO_DEVICE}
_ALL_ONES = 255  # as bytes: NaN in every floating-point type


class Poison:
    """While it is applied, every program's released buffers are filled. `filled` counts them by pool."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.filled: dict[Pool, int] = defaultdict(int)
        self._touched: dict[int, tuple[Program, list[list[tuple[int, bool]]]]] = {}
        self._buffers: WeightBuffers | None = None
        self._watch_ledgers(patch)
        self._watch_buffers(patch)
        self._watch_programs(patch)
        self._watch_blocks(patch)

    def _watch_ledgers(self, patch: pytest.MonkeyPatch) -> None:
        noted: dict[int, list[list[tuple[int, bool]]]] = defaultdict(list)
        op, finish = Ledger.op, Ledger.finish

        def noting(ledger: Ledger, verb: Any, lane: Any, reads: Any = (), writes: Any = (), *given: Any, **what: Any) -> int:
            used = [(each & WHOLE_MASK, False) for each in reads]
            noted[id(ledger)].append([*used, *((each & WHOLE_MASK, _is_whole(each, lane)) for each in writes)])
            return op(ledger, verb, lane, reads, writes, *given, **what)

        def finishing(ledger: Ledger) -> Any:
            program, snapshot = finish(ledger)
            self._touched[id(program)] = program, noted.pop(id(ledger), [])
            return program, snapshot

        patch.setattr(Ledger, "op", noting)
        patch.setattr(Ledger, "finish", finishing)

    def _watch_buffers(self, patch: pytest.MonkeyPatch) -> None:
        begin = WeightBuffers.__init__

        def beginning(buffers: WeightBuffers, *given: Any, **more: Any) -> None:
            begin(buffers, *given, **more)
            self._buffers = buffers

        patch.setattr(WeightBuffers, "__init__", beginning)

    def _watch_programs(self, patch: pytest.MonkeyPatch) -> None:
        begin = Interpreter._begin

        def beginning(interpreter: Interpreter, program: Program, perform: Callable[[Op], None], step: int) -> Any:
            return begin(interpreter, program, self._filling(program, perform), step)

        patch.setattr(Interpreter, "_begin", beginning)

    def _watch_blocks(self, patch: pytest.MonkeyPatch) -> None:
        close = WholeBlock.close

        def closing(block: WholeBlock) -> None:
            close(block)
            block._came.fill_(torch.nan)
            block._rounded.fill_(torch.nan)
            self.filled[Pool.ROUNDED] += 1

        patch.setattr(WholeBlock, "close", closing)

    def _filling(self, program: Program, perform: Callable[[Op], None]) -> Callable[[Op], None]:
        """Return what performs an operation, and fills what nothing touches any more."""
        _, uses = self._touched.get(id(program), (program, []))
        left, of_op, lock = dict[tuple[int, int], int](), defaultdict[int, list[tuple[int, int]]](list), threading.Lock()
        number, dead = defaultdict[int, int](int), set[tuple[int, int]]()
        for index, each in enumerate(uses):
            for buffer, whole in each:
                if whole:
                    dead.add((buffer, number[buffer]))  # what was there until now
                    number[buffer] += 1
                key = buffer, number[buffer]
                if key not in of_op[index]:
                    of_op[index].append(key)
                    left[key] = left.get(key, 0) + 1

        def performing(op: Op) -> None:
            perform(op)
            with lock:
                for key in of_op[op.index]:
                    left[key] -= 1
                    if not left[key] and key in dead and key[1]:  # what came from the program before is not all known
                        self._fill(key[0])

        return performing

    def _fill(self, buffer: int) -> None:
        pool, slot = Pool(buffer >> SLOT_MASK.bit_length()), buffer & SLOT_MASK
        places, size = _PLACES[pool](self._buffers) if pool in _PLACES and self._buffers is not None else (), 1
        if pool in _OF_EXPERTS:
            size = self._buffers._placement.experts.in_round  # type: ignore[union-attr]
        for place in places[slot * size : (slot + 1) * size]:
            memory = place if isinstance(place, torch.Tensor) else torch.from_numpy(place)
            memory.view(torch.uint8).fill_(_ALL_ONES)
            self.filled[pool] += 1


def _is_whole(written: int, lane: Lane) -> bool:
    pool = Pool((written & WHOLE_MASK) >> SLOT_MASK.bit_length())
    return written == written & WHOLE_MASK and _BROUGHT_BY.get(pool, lane) is lane
