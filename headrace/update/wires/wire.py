"""What a wire is: how a gradient travels from backward to the rule that uses it, and so which part of a unit is trained.

A wire is one class in one file of `update/wires`. `Wire` has the defaults, and a subclass has what differs. It also says what
follows from it: what it refuses, what a plan may choose, what is left to do after a step, and what is exported.

The plain wire (`wires.dense`) takes a unit's whole gradient, which has the unit's own elements. Other wires may have other
elements: those of a subspace into which gradients are projected, of an adapter's matrices, or of some parameters alone. These
are then the *trained family*. Gradients, states and updates have its elements; the slot that compute reads is made of it and of
the frozen weights.

Invariant: what a wire does follows from its arguments alone, so that doing it again gives the same bits.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from headrace.terms.embedding_rows import TableFigures
from headrace.terms.errors import ConfigError
from headrace.terms.forms import Form
from headrace.terms.layout import ParameterSpec, UnitLayout, part
from headrace.terms.options.gradient import GradientWay
from headrace.terms.options.optimizer import ALL, Optimizer

if TYPE_CHECKING:  # choices that exclude one another are refused before transformers is loaded
    from headrace.model import Chain, Checkpoint, WeightMap
    from headrace.model.blocks.beside import BesideKind, StoredBeside
    from headrace.model.written.export import ReadUnit
    from headrace.update.tables.table_rows import RowFamily, TableRows

# Elements of a gradient that are added at once: enough for all threads, with a few megabytes of copies.
_ADD_ELEMENTS = 1 << 20

Sink: TypeAlias = Callable[[ParameterSpec, Tensor], None]
Bases: TypeAlias = tuple[Tensor, Tensor]
ReadTrained: TypeAlias = Callable[[int], Mapping[str, Tensor]]
"""Reads the newest weights of a unit's trained family: each parameter's, flat, float32."""


class Catching(NamedTuple):
    """How the gradients of a unit are taken while its backward runs. `sink` gets the gradients of the parameters that are
    `wanted`, each once it is complete for the running backward; for the others autograd computes none. `rows` gets gradients
    of some rows of a parameter, from the element that is its last argument on.
    """

    sink: Sink
    wanted: Callable[[ParameterSpec], bool]
    rows: Callable[[ParameterSpec, Tensor, int], None] | None = None


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
    """When a gradient of a subspace is caught: step (from 0), unit, micro-batch. `seed` is the run's, `basis` the subspace's.

    `kept` belongs to the wire, from one micro-batch of a step and unit to the next; `propose` takes the basis that it found.
    """

    step: int
    unit: int
    micro: int
    num_micro: int
    seed: int
    basis: Tensor
    kept: MutableMapping[str, Tensor]
    propose: Callable[[Proposal], None]


class UnitGradients:
    """Where the gradients of a unit's trained family are summed, in one flat tensor; `trained` says where each lies.

    `delivered` names the parameters that got gradients since the step began; for others the tensor holds an older step's.
    `moment` is for a wire that trains a subspace, and None for others.
    """

    def __init__(self, trained: UnitLayout, flat: Tensor, delivered: set[str], moment: Moment | None = None) -> None:
        self.trained, self.moment = trained, moment
        self._places = {spec.name: spec for spec in trained.parameters}
        self._flat, self._delivered = flat, delivered

    def takes(self, spec: ParameterSpec) -> bool:
        """Return whether the trained family has a parameter of this name."""
        return spec.name in self._places

    def add(self, name: str, gradient: Tensor, start: int = 0) -> None:
        """Add `gradient`, of any shape, to that of the trained parameter `name`, from its element `start` on."""
        whole, flat = part(self._flat, self._places[name]), gradient.reshape(-1)
        into = whole[start : start + flat.numel()]
        if name not in self._delivered:
            self._delivered.add(name)
            if into.numel() == whole.numel():  # the first gradient is copied instead of added to zero
                into.copy_(flat)
                return
            whole.zero_()
        # In pieces, because for another dtype torch copies all that it adds into the sum's dtype.
        for start in range(0, into.numel(), _ADD_ELEMENTS):
            into[start : start + _ADD_ELEMENTS].add_(flat[start : start + _ADD_ELEMENTS])

    def finish(self) -> None:
        """Add what is on its way: here nothing is."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a run's result is written from: the model as it is stored, as units, and where each parameter is stored.

    `reader` makes what gives the newest weights of each unit, which takes memory. `read_trained` gives those of a unit's
    trained family, by parameter (float32). `notes` are the texts of files beside them.
    """

    checkpoint: "Checkpoint"
    chain: "Chain"
    weights: "WeightMap"
    reader: "Callable[[], ReadUnit]"
    read_trained: ReadTrained
    notes: Mapping[str, str]


class Wire:
    """How gradients of the units of a model travel. By default all of a unit is trained, in place.

    With a `trained` of its own a subclass trains some of a unit's parameters, as they are, beside the others, which are frozen.
    Whatever else the trained family has (a subspace, matrices beside the weights) is for other methods to say.

    Attributes:
        ways: what users name the wire by, with its settings; () for a wire that only a program gives.
        is_beside: compute reads the trained family beside the frozen weights, and no slot is completed with it. Then
            `complete` is only for export, and gradients come to the `sink` of `beside`.
        settings, seed: what the user chose; the run's seed.
        merges_each_step: weights are merged after every step, not only where a basis changes.
        has_whole_state: the units of a state have the newest weights, but for what is computed beside them.
        adapters: the modules that blocks compute with besides their own; None for a wire without any.
    """

    ways: ClassVar[tuple[type[GradientWay], ...]] = ()
    is_beside: ClassVar[bool] = False
    settings: GradientWay
    adapters: "BesideKind | None" = None
    merges_each_step = False
    has_whole_state: ClassVar[bool] = True

    def __init__(self, settings: GradientWay | None = None, seed: int = 0) -> None:
        self.settings, self.seed = settings or next(iter(self.ways), GradientWay)(), seed

    def of(self, chain: "Chain") -> "Wire":
        """Return the wire for the units of `chain`.

        Raises:
            ConfigError: it cannot train this model.
        """
        return self

    def begun(self, chain: "Chain", weights: "WeightMap") -> "Wire":
        """Return the wire of a run that begins, with the first numbers that it has from elsewhere.

        Raises:
            InputError: these cannot be read, or are not for this model.
        """
        return self

    @property
    def name(self) -> str:
        """The wire's name in a run's record. A run keeps the wire that it began with."""
        return self.settings.text

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know about what is trained of a chain, and exported."""
        return self.adapters.notes if self.adapters is not None else ()

    # What is trained, and how its gradient comes.

    def trained(self, unit: int, layout: UnitLayout, *, is_block: bool) -> UnitLayout | None:
        """Return the layout of the trained part of a unit. It is `layout` itself if all is trained in place, None for nothing,
        and another layout for a trained family, which blocks may have.
        """
        return layout

    def table(self, unit: int) -> TableFigures | None:
        """Return the table beside a unit whose rows are read and updated one by one; None if there is none."""
        return None

    @property
    def row_families(self) -> "Mapping[int, RowFamily]":
        """The tables whose rows are read and updated one by one, by unit."""
        return {}

    def serve(self, rows: "TableRows") -> None:
        """Compute with `rows` of its tables from now on."""
        raise AssertionError("there are no tables")

    @contextmanager
    def catch(self, unit: int, layout: UnitLayout, weights: Tensor, gradients: UnitGradients) -> Iterator[Catching]:
        """Make the context for one micro-batch's backward of a unit, in which its forward is computed again. (Gradients of
        units trained in place are always taken as they are.)

        `weights` is the slot that the unit's parameters are views of: a parameter is identified by where it lies. A wire that
        takes a gradient by its factors replaces the model's product by its own in this context, and wants no gradient of it.
        """

        def add(spec: ParameterSpec, gradient: Tensor, start: int = 0) -> None:
            gradients.add(spec.name, gradient, start)

        yield Catching(add, gradients.takes, add)

    def as_they_are(self, unit: int, layout: UnitLayout, trained: UnitLayout) -> Iterator[tuple[ParameterSpec, ParameterSpec]]:
        """Yield the parameters that a trained family has as they are, of the same name and shape: their places in both."""
        own = {(spec.name, spec.shape): spec for spec in trained.parameters}
        yield from ((spec, own[key]) for spec in layout.parameters if (key := (spec.name, spec.shape)) in own)

    def first_weights(self, unit: int, layout: UnitLayout, trained: UnitLayout, weights: Tensor) -> Tensor:
        """Return the trained family's first weights, float32 of `trained.num_elements`, for a unit's imported `weights`: zero
        for what is not trained as it is.
        """
        first = torch.zeros(trained.num_elements, dtype=torch.float32)
        for spec, own in self.as_they_are(unit, layout, trained):
            part(first, own).copy_(part(weights, spec))
        return first

    def complete(self, unit: int, layout: UnitLayout, slot: Tensor, trained: UnitLayout, weights: Tensor) -> None:
        """Change `slot`, which has the frozen weights in the compute dtype, in place to the weights that compute reads.

        `weights` are the trained family's, float32, followed by the basis. Upload, evaluation and export all go this way.
        """
        for spec, own in self.as_they_are(unit, layout, trained):
            part(slot, spec).copy_(part(weights, own))

    def making_bytes(self, layout: UnitLayout) -> int:
        """Return the most bytes that `complete` allocates at once for a unit of this layout."""
        return 0

    def beside(self, unit: int, trained: UnitLayout, weights: Tensor, sink: Sink | None) -> AbstractContextManager[None]:
        """Return the context in which `unit` computes with its trained family, whose `weights` (float32) are laid out by
        `trained`. `sink` gets the gradients; None if there are none.
        """
        raise AssertionError("nothing is computed beside the weights")

    # What it refuses, and leaves to the plan.

    def refuse(self, optimizer: Optimizer) -> None:
        """Raise ConfigError if the wire does not go together with a rule or with what that trains."""

    def refuse_forms(self, forms: Sequence[Form], train: str) -> None:
        """Raise ConfigError if a model whose units have these forms cannot be trained; `train` is the option."""
        if not any(form.trained for form in forms):
            what = f" with train: {train}" if train != ALL else ""
            raise ConfigError(f"wire: {self.name}{what} trains nothing of this model; give one that does")

    def choices(self, layouts: Sequence[UnitLayout]) -> "Sequence[Wire]":
        """Return the wires among which a plan may choose for blocks of these layouts, best first; only itself, where nothing is
        open. The first is taken whose states fit into host memory; if none fits, the last.
        """
        return (self,)

    # What is exported.

    def export_bytes(self, checkpoint: "Checkpoint") -> int:
        """Return the bytes that `export` writes."""
        from headrace.model import export_bytes

        return export_bytes(checkpoint)

    def export(self, content: Content, directory: Path) -> None:
        """Write the newest weights as an ordinary Hugging Face directory, or as whatever stands for them."""
        from headrace.model import Exporter

        Exporter(content.checkpoint, content.chain, directory, content.reader(), notes=content.notes).write()

    def stored(self, read_trained: ReadTrained) -> "StoredBeside":
        """Return what lies beside the weights, to compute with."""
        raise AssertionError("nothing lies beside the weights")

    # A subspace that changes now and then has a *basis*, which lies beside the trained family. When it changes, frozen weights
    # are merged with the trained family by `complete`, on their fp32 master. Everything of the old basis is moved
    # (`flow.step.settle`).

    def basis(self, unit: int, layout: UnitLayout, trained: UnitLayout) -> UnitLayout | None:
        """Return the layout of the float32 numbers of the basis; None if there is none. They are zero until one is proposed."""
        return None

    def restart(self, unit: int, layout: UnitLayout, trained: UnitLayout, weights: Tensor) -> None:
        """Change the trained family's `weights` in place to those with which merged weights are complete."""
        raise AssertionError("no basis changes")

    def move(self, unit: int, layout: UnitLayout, trained: UnitLayout, bases: Bases, states: Mapping[str, Tensor]) -> None:
        """Move `states` (planes by name, float32, of the trained family's elements) in place from one basis to the other."""
        raise AssertionError("no basis changes")
