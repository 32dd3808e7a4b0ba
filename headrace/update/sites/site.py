"""What a far site is: a place, outside this process's stores, where weights and states live and the rule runs.

A unit that lives there is pulled before compute uses it, and its gradient is pushed once it is summed. Once a step, when the
norm of all gradients is known, the step is concluded: applied, scaled or skipped. Then the site updates its units, and a pull
gives the new weights. So local units (`sites.host`, `sites.device`) and far ones may be mixed: the norm is that of all.

Invariant: after `commit` of step n the site can go back to it until `commit` of step n + 1 has returned.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from headrace.machine.host_memory import Bytes
from headrace.update.rules.rule import StepScalars


class Site(Protocol):
    """Where far units live. `pull` and `push` are called from lanes of their own, the other methods while neither runs."""

    @property
    def name(self) -> str:
        """The site's name in a run's record. A run keeps the site that it began with."""

    def holds(self, unit: int) -> bool:
        """Return whether a unit lives at this site."""

    def begin(self, unit: int, weights: Bytes) -> None:
        """Take the imported weights of a unit, as bytes of the compute dtype."""

    def pull(self, unit: int, into: Bytes) -> None:
        """Fill `into` with a unit's newest weights, after all concluded updates, as bytes of the compute dtype."""

    def push(self, unit: int, gradient: NDArray[Any]) -> None:
        """Take a unit's gradient of this step in NumPy's types (bfloat16 as bits); the caller reuses the array afterwards."""

    def conclude(self, scalars: Mapping[int, StepScalars] | None) -> None:
        """Update each unit whose gradient was pushed, by its scalars; None: the step and its gradients are thrown away."""

    def commit(self, num_steps: int) -> None:
        """Make everything that was concluded durable, as the state after `num_steps` steps."""

    def go_back(self, num_steps: int) -> None:
        """Return to the state that was committed after `num_steps` steps: a run is resumed there."""
