"""What a wire is: how a gradient travels from backward to the rule that uses it, and so what of a unit is trained.

The plain wire (`wires.dense`) takes a unit's whole gradient, which is of the unit's own elements. Another one may be of other
elements: of a subspace into which gradients are projected, of an adapter's matrices, of some parameters alone. Then these are
the *trained family*: gradients, states and updates are of its elements, and the slot that compute reads is made of the frozen
weights and of it.

Invariant: what a wire does is a function of its arguments alone, so that it can be done again and gives the same bits.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from headrace.terms.layout import ParameterSpec, Plane, UnitLayout

# Elements of a gradient that are added at once: enough for all threads, a few megabytes of copies.
_ADD_ELEMENTS = 1 << 20


class Caught(NamedTuple):
    """How the gradients of a unit are taken while its backward runs: `sink` is given those of the parameters that are `wanted`,
    each once it is complete for the running backward; for the others autograd computes none.
    """

    sink: Callable[[ParameterSpec, Tensor], None]
    wanted: Callable[[ParameterSpec], bool]


class Proposal(NamedTuple):
    """A basis that a wire has found for a unit while it caught gradients (float32, all of it, on the host).

    `replaces`: trained numbers and states are of the basis that there is, and are to be moved; if not, there was none.
    `errors` say how good each matrix's basis is: of the one that there was, and of the new one where another was tried.
    """

    basis: Tensor
    replaces: bool
    errors: Mapping[str, tuple[float, float | None]]


@dataclass(frozen=True, slots=True)
class Moment:
    """When a gradient is caught: step (from 0), unit, micro-batch. `seed` is the run's.

    `kept` is the wire's own, from one micro-batch of a step and unit to the next; `propose` takes what it found.
    """

    step: int
    unit: int
    micro: int
    num_micro: int
    seed: int
    kept: MutableMapping[str, Tensor]
    propose: Callable[[Proposal], None]


class Gradients:
    """Where the gradients of a unit's trained family are summed, one flat tensor for all; `trained` says where each lies.

    `delivered` names those that have been given since the step began: what is there before is an older step's. `basis` and
    `moment` are for a wire that trains a subspace: None for others.
    """

    def __init__(
        self,
        trained: UnitLayout,
        flat: Tensor,
        delivered: set[str],
        basis: Tensor | None = None,
        moment: Moment | None = None,
    ) -> None:
        self.trained, self.basis, self.moment = trained, basis, moment
        self._places = {spec.name: spec for spec in trained.parameters}
        self._flat, self._delivered = flat, delivered

    def add(self, name: str, gradient: Tensor) -> None:
        """Add `gradient`, of any shape, to that of the trained parameter `name`; the first one is copied."""
        spec = self._places[name]
        into, flat = self._flat[spec.offset : spec.offset + spec.num_elements], gradient.reshape(-1)
        if name not in self._delivered:  # the first gradient is copied instead of added to zero
            into.copy_(flat)
            self._delivered.add(name)
            return
        # In pieces: for another dtype torch makes a copy of all that it adds, in the sum's dtype.
        for start in range(0, into.numel(), _ADD_ELEMENTS):
            into[start : start + _ADD_ELEMENTS].add_(flat[start : start + _ADD_ELEMENTS])


class Wire(Protocol):
    """How gradients of the units of a model travel."""

    @property
    def name(self) -> str:
        """What a run's record says: a run goes on with the wire that it began with."""

    def trained(self, unit: int, layout: UnitLayout, *, is_block: bool) -> UnitLayout | None:
        """Return the layout of what is trained of a unit: `layout` itself for all of it, in place; None for nothing; another
        one for a trained family of its own, which blocks may have.
        """

    def catch(self, unit: int, layout: UnitLayout, weights: Tensor, gradients: Gradients) -> AbstractContextManager[Caught]:
        """Return the context in which the forward of a unit with a trained family of its own is computed again, and its
        backward, on one micro-batch. (Gradients of what is trained in place are taken as they are.)

        `weights` is the slot that the unit's parameters are views of: a parameter is known by where it lies. A wire that takes
        a gradient by its factors puts its own product in place of the model's in this context, and wants no gradient of it.
        """

    def first_weights(self, unit: int, layout: UnitLayout, trained: UnitLayout, weights: Tensor) -> Tensor:
        """Return the trained family's first weights, float32 of `trained.num_elements`, for a unit's imported `weights`."""

    def complete(self, unit: int, layout: UnitLayout, slot: Tensor, trained: UnitLayout, weights: Tensor) -> None:
        """Change `slot`, which has the frozen weights in the compute dtype, in place to the weights that compute reads.

        `weights` are the trained family's, float32. Upload, evaluation and export all go this way.
        """

    def making_bytes(self, layout: UnitLayout) -> int:
        """Return the most that `complete` allocates at once for a unit of this layout."""


@runtime_checkable
class BesideWire(Wire, Protocol):
    """A wire whose trained family compute reads beside the frozen weights, which no slot is completed with: adapters.

    `complete` is then for export alone, and gradients need no `catch`.
    """

    def bind(
        self, unit: int, trained: UnitLayout, weights: Tensor, sink: Callable[[ParameterSpec, Tensor], None] | None
    ) -> None:
        """Let `unit` compute with its trained family, whose `weights` (float32) are laid out by `trained`; `sink` is given the
        gradients, None where there are none.
        """

    def release(self, unit: int) -> None:
        """Let nothing of these weights be referred to."""


@runtime_checkable
class SubspaceWire(Wire, Protocol):
    """A wire whose trained family is of a subspace that changes now and then: its *basis* lies beside the trained family.

    `weights` in `complete` are then the trained family's and, behind them, the basis. When the basis changes, frozen weights
    are merged with what is trained, by `complete` on their fp32 master, and all that is of the old basis is moved
    (`flow.settle`).
    """

    def choices(self, layouts: Sequence[UnitLayout]) -> "Sequence[SubspaceWire]":
        """Return what a plan may choose from for blocks of these layouts, best first: itself alone, where nothing is open. The
        first one is taken whose states host memory holds; else the last.
        """

    @property
    def merges_each_step(self) -> bool:
        """Whether weights are merged after every step, not only where the basis changes."""

    def basis(self, unit: int, layout: UnitLayout, trained: UnitLayout) -> UnitLayout:
        """Return the layout of the numbers, float32, that the basis is given by; all zero until one is proposed."""

    def refuse(self, states: Sequence[Plane]) -> None:
        """Raise ConfigError where a rule keeps states that cannot be moved to another basis."""

    def restart(self, unit: int, layout: UnitLayout, trained: UnitLayout, weights: Tensor) -> None:
        """Change the trained family's `weights` in place to those that merged weights are completed with."""

    def move(
        self,
        unit: int,
        layout: UnitLayout,
        trained: UnitLayout,
        basis: Tensor,
        other: Tensor,
        states: Mapping[str, Tensor],
    ) -> None:
        """Change `states` (planes by name, float32, of the trained family's elements) in place from `basis` to `other`."""
