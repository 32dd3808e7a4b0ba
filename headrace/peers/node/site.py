"""The far site of a worker: everything lives at a node, in the present generation.

The node has the norm of all gradients; so it decides by itself what becomes of them, and commits.
"""

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from headrace.machine.host_memory import Bytes
from headrace.peers.meet.exchange import add_up, take_in
from headrace.peers.meet.generation import Generation
from headrace.terms.options.summing import Order
from headrace.update.rules.rule import StepScalars
from headrace.update.rules.tensors import as_tensor


class NodeSite:
    """Pulls and pushes over the lanes of `generation`. Sums of gradients have `gradient_dtype`. Where there are other workers,
    float32 is pushed, and added in `order`, which may differ from step to step.
    """

    name = "node"

    def __init__(self, generation: Generation, gradient_dtype: torch.dtype) -> None:
        self._generation, self._dtype = generation, gradient_dtype
        self.order: Order = 1

    @property
    def rank(self) -> int:
        """The worker's."""
        return self._generation.rank

    def holds(self, unit: int) -> bool:
        """Return True: a worker holds nothing itself."""
        return True

    def begin(self, unit: int, weights: Bytes) -> None:
        """Never called: the node imports."""
        raise AssertionError("a worker imports nothing")

    def pull(self, unit: int, into: Bytes) -> None:
        """Fill `into` with a unit's newest weights."""
        take_in(self._generation.down, into)

    def push(self, unit: int, gradient: NDArray[Any]) -> None:
        """Send a unit's gradient, summed with those of other workers."""
        add_up(self._generation.up, as_tensor(gradient, bfloat16=True), self._dtype, self.order)

    def conclude(self, scalars: Mapping[int, StepScalars] | None) -> None:
        """Do nothing: the node has the norm of all workers' gradients, and this worker only that of its own."""

    def commit(self, num_steps: int) -> None:
        """Do nothing: the node commits."""

    def go_back(self, num_steps: int) -> None:
        """Do nothing: the node says which step is next."""
