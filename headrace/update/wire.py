"""What a wire is: how a gradient travels from backward to the rule that uses it, and so which part of a unit is trained.

The plain wire (`wires.dense`) takes a unit's whole gradient, which has the unit's own elements. Other wires may have other
elements: those of a subspace into which gradients are projected, of an adapter's matrices, or of some parameters alone. These
are then the *trained family*. Gradients, states and updates have its elements; the slot that compute reads is made of it and of
the frozen weights.

Invariant: what a wire does follows from its arguments alone, so that doing it again gives the same bits.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from headrace.terms.layout import ParameterSpec, Plane, UnitLayout

# Elements of a gradient that are added at once: enough for all threads, with a few megabytes of copies.
_ADD_ELEMENTS = 1 << 20


class Caught(NamedTuple):
    """How the gradients of a unit are taken while its backward runs. `sink` gets the gradients of the parameters that are
    `wanted`, each once it is complete for the running backward; for the others autograd computes none.
    """

    sink: Callable[[ParameterSpec, Tensor], None]
    wanted: Callable[[ParameterSpec], bool]


class Proposal(NamedTuple):
    """A basis that a wire has found for a unit while it caught gradients (float32, all of it, on the host).

    `replaces`: trained numbers and states belong to an earlier basis, and have to be moved; if not, there was no basis.
    `errors` are by matrix: the error of the basis that there was, and that of the new one where another was tried.
    """

    basis: Tensor
    replaces: bool
    errors: Mapping[str, tuple[float, float | None]]


@dataclass(frozen=True, slots=True)
class Moment:
    """When a gradient is caught: step (from 0), unit, micro-batch. `seed` is the run's.

    `kept` belongs to the wire, from one micro-batch of a step and unit to the next; `propose` takes the basis that it found.
    """

    step: int
    unit: int
    micro: int
    num_micro: int
    seed: int
    kept: MutableMapping[str, Tensor]
    propose: Callable[[Proposal], None]


class Gradients:
    """Where the gradients of a unit's trained family are summed, in one flat tensor; `trained` says where each lies.

    `delivered` names the parameters that got gradients since the step began; for others the tensor holds an older step's.
    `basis` and `moment` are for a wire that trains a subspace, and None for others.
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
        """Add `gradient`, of any shape, to that of the trained parameter `name`."""
        spec = self._places[name]
        into, flat = self._flat[spec.offset : spec.offset + spec.num_elements], gradient.reshape(-1)
        if name not in self._delivered:  # the first gradient is copied instead of added to zero
            into.copy_(flat)
            self._delivered.add(name)
            return
        # In pieces, because for another dtype torch copies all that it adds into the sum's dtype.
        for start in range(0, into.numel(), _ADD_ELEMENTS):
            into[start : start + _ADD_ELEMENTS].add_(flat[start : start + _ADD_ELEMENTS])


class Wire(Protocol):
    """How gradients of the units of a model travel."""

    @property
    def name(self) -> str:
        """The wire's name in a run's record. A run keeps the wire that it began with."""

    def trained(self, unit: int, layout: UnitLayout, *, is_block: bool) -> UnitLayout | None:
        """Return the layout of the trained part of a unit. It is `layout` itself if all is trained in place, None for nothing,
        and another layout for a trained family, which blocks may have.
        """

    def catch(self, unit: int, layout: UnitLayout, weights: Tensor, gradients: Gradients) -> AbstractContextManager[Caught]:
        """Return the context for one micro-batch's backward of a unit with a trained family of its own, in which its forward
        is computed again. (Gradients of units trained in place are taken as they are.)

        `weights` is the slot that the unit's parameters are views of: a parameter is identified by where it lies. A wire that
        takes a gradient by its factors replaces the model's product by its own in this context, and wants no gradient of it.
        """

    def first_weights(self, unit: int, layout: UnitLayout, trained: UnitLayout, weights: Tensor) -> Tensor:
        """Return the trained family's first weights, float32 of `trained.num_elements`, for a unit's imported `weights`."""

    def complete(self, unit: int, layout: UnitLayout, slot: Tensor, trained: UnitLayout, weights: Tensor) -> None:
        """Change `slot`, which has the frozen weights in the compute dtype, in place to the weights that compute reads.

        `weights` are the trained family's, float32. Upload, evaluation and export all go this way.
        """

    def making_bytes(self, layout: UnitLayout) -> int:
        """Return the most bytes that `complete` allocates at once for a unit of this layout."""


@runtime_checkable
class BesideWire(Wire, Protocol):
    """A wire whose trained family compute reads beside the frozen weights; no slot is completed with it: adapters.

    `complete` is then only for export, and gradients need no `catch`.
    """

    def bind(
        self, unit: int, trained: UnitLayout, weights: Tensor, sink: Callable[[ParameterSpec, Tensor], None] | None
    ) -> None:
        """Let `unit` compute with its trained family, whose `weights` (float32) are laid out by `trained`. `sink` gets the
        gradients; None if there are none.
        """

    def release(self, unit: int) -> None:
        """Drop all references to these weights."""


@runtime_checkable
class SubspaceWire(Wire, Protocol):
    """A wire that trains a subspace which changes now and then: a *basis* lies beside the trained family.

    `weights` in `complete` are then the trained family's, followed by the basis. When the basis changes, frozen weights are
    merged with the trained family by `complete`, on their fp32 master. Everything of the old basis is moved (`flow.settle`).
    """

    def choices(self, layouts: Sequence[UnitLayout]) -> "Sequence[SubspaceWire]":
        """Return the wires among which a plan may choose for blocks of these layouts, best first; only itself, where nothing is
        open. The first is taken whose states fit into host memory; if none fits, the last.
        """

    @property
    def merges_each_step(self) -> bool:
        """Whether weights are merged after every step, not only where the basis changes."""

    def basis(self, unit: int, layout: UnitLayout, trained: UnitLayout) -> UnitLayout:
        """Return the layout of the float32 numbers of the basis; they are all zero until one is proposed."""

    def refuse(self, states: Sequence[Plane]) -> None:
        """Raise ConfigError if a rule keeps states that cannot be moved to another basis."""

    def restart(self, unit: int, layout: UnitLayout, trained: UnitLayout, weights: Tensor) -> None:
        """Change the trained family's `weights` in place to those with which merged weights are complete."""

    def move(
        self,
        unit: int,
        layout: UnitLayout,
        trained: UnitLayout,
        basis: Tensor,
        other: Tensor,
        states: Mapping[str, Tensor],
    ) -> None:
        """Move `states` (planes by name, float32, of the trained family's elements) in place from `basis` to `other`."""
