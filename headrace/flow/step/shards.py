"""Ranks share out every unit: what others hold comes here, and gradients go to the ranks that hold the unit's parts.

Invariant: the norm and each sum have the same bits, however many ranks share them out.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.flow.step.step_state import StepState
from headrace.flow.weights.make import Maker
from headrace.flow.weights.weights import StoreSource
from headrace.machine.host_memory import Bytes
from headrace.store import StateStore
from headrace.terms.families import TRAINED, WEIGHTS
from headrace.terms.program import Op, Pool
from headrace.terms.shards import elements_by_rank
from headrace.update.rules.norm import BLOCK_ELEMENTS, add_block_sums, block_square_sums


class Peers(Protocol):
    """The ranks among which every unit is shared out. Each method is called from one thread at a time, by all ranks in the
    same order.
    """

    rank: int
    size: int

    def gather(self, unit: int, family: str, whole: Bytes) -> None:
        """Fill `whole`, the bytes of a family, with what others hold."""

    def clear(self, into: Bytes) -> None:
        """Return once no rank needs what lies in `into`, if that is memory of all ranks of this machine. Threads may call it at
        once.
        """

    def scatter(self, gradient: torch.Tensor, parts: Sequence[slice]) -> None:
        """Replace this rank's part of `gradient`, flat and fp32, by the sum of all ranks'."""

    def gather_norms(self, sums: NDArray[np.float64], parts: Sequence[slice]) -> None:
        """Fill `sums` with the parts of the other ranks."""


class SharedSource(StoreSource):
    """The newest weights of a rank's store: its part of each unit.

    Where ranks share memory, a rank reads into it once all have done with what lay there. No update needs to wait: it follows
    the gradient's scatter, to which each rank comes when it has computed with the unit.
    """

    def __init__(self, store: StateStore, maker: Maker, peers: Peers) -> None:
        super().__init__(store, maker)
        self._peers = peers

    def read(self, unit: int, into: Bytes) -> None:
        """See `WeightSource.read`."""
        self._peers.clear(into)
        super().read(unit, into)

    def read_trained(self, memory: Mapping[int, Bytes]) -> None:
        """See `WeightSource.read_trained`."""
        for into in memory.values():
            self._peers.clear(into)
        super().read_trained(memory)


def gather(state: StepState, op: Op) -> None:
    """Complete a unit's weights with the parts that other ranks hold: the weights that are fetched, or what is trained."""
    buffers = state.parts.buffers
    if op.slot(Pool.TRAINED) >= 0:
        trained = buffers.trained[op.unit][: state.plan.trained_bytes(op.unit)]
        state.parts.peers.gather(op.unit, TRAINED, trained)
    else:
        state.parts.peers.gather(op.unit, WEIGHTS, buffers.stored(op.unit, op))


def scatter(state: StepState, op: Op) -> None:
    """Send a unit's gradient to the ranks that hold its parts, add theirs to this rank's, and square that."""
    gradient, slot = state.parts.buffers, op.slot(Pool.GRADIENT)
    state.parts.peers.scatter(gradient.gradient_tensor(op.unit, slot), _parts(state, op.unit))
    own = gradient.gradient(op.unit, slot)[own_elements(state, op.unit)]
    state.square_blocks[op.unit] = block_square_sums(own) if own.size else np.empty(0)


def own_elements(state: StepState, unit: int) -> slice:
    """Return the elements of a unit's gradient that this rank updates."""
    peers: Peers = state.parts.peers
    return _parts(state, unit)[peers.rank]


def add_norms(state: StepState) -> None:
    """Gather the square sums of all parts, and add those of each unit in the order of its elements."""
    units, size = sorted(state.square_blocks), state.parts.peers.size
    counts = [[-(-(part.stop - part.start) // BLOCK_ELEMENTS) for part in _parts(state, unit)] for unit in units]
    ends = np.cumsum([0, *(count[rank] for rank in range(size) for count in counts)])
    places = [[slice(*ends[rank * len(units) + at :][:2]) for rank in range(size)] for at in range(len(units))]
    sums, by_rank = np.zeros(int(ends[-1])), ends[:: len(units)] if units else [0] * (size + 1)
    for at, unit in enumerate(units):
        sums[places[at][state.parts.peers.rank]] = state.square_blocks[unit]
    state.parts.peers.gather_norms(sums, [slice(int(by_rank[rank]), int(by_rank[rank + 1])) for rank in range(size)])
    for at, unit in enumerate(units):
        state.square_sums[unit] = add_block_sums(np.concatenate([sums[place] for place in places[at]]))


def _parts(state: StepState, unit: int) -> list[slice]:
    """Return by rank the elements of a unit's gradient that it updates."""
    described = state.parts.store.manifest.units[unit]
    family = described.family(WEIGHTS if state.plan.units[unit].in_place else TRAINED)
    assert family is not None, "what is updated has a family"
    return elements_by_rank(family, unit, state.parts.peers.size)
