"""The far site of a worker: everything lives at a node, which is there in this generation.

The node decides for itself what becomes of gradients, and commits: it has the norm of all of them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.machine.host_memory import Bytes
from headrace.net import Generation
from headrace.net.exchange import NODE, take_in
from headrace.update.rule import StepScalars


class NodeSite:
    """Pulls and pushes over the lanes of `generation`."""

    name = "node"

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def holds(self, unit: int) -> bool:
        """Return True: a worker has nothing."""
        return True

    def begin(self, unit: int, weights: Bytes) -> None:
        """Never called: the node imports."""
        raise AssertionError("a worker imports nothing")

    def pull(self, unit: int, into: Bytes) -> None:
        """Fill `into` with a unit's newest weights."""
        take_in(self._generation.down, into)

    def push(self, unit: int, gradient: NDArray[Any]) -> None:
        """Send a unit's gradient."""
        self._generation.up.send(gradient.view(np.uint8), NODE)

    def conclude(self, scalars: Mapping[int, StepScalars] | None) -> None:
        """Nothing: the node has the norm of all workers' gradients, and this worker only that of its own."""

    def commit(self, num_steps: int) -> None:
        """Nothing: the node commits."""

    def go_back(self, num_steps: int) -> None:
        """Nothing: the node says which step is next."""
