"""The weights of a block that is being compressed, in two forms: original and rounded.

Either both forms of the whole block are in memory. If a mixture's block is too large for that, memory holds both forms of its
common part, and one expert at a time. The original expert is read from the model's files; the rounded one from a file beside
the hidden states.
Invariant: rows get the same bits either way.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from headrace.compress.hidden_rows import HiddenRows
from headrace.compress.rounding import Rounding, stored_matrix
from headrace.model import Chain, WeightMap
from headrace.model.blocks.binding import Binding
from headrace.model.blocks.parking import ParkedThread
from headrace.model.chain.caught import Matrix, Place, matrices_of
from headrace.model.parts.banks import Banks, BlockExperts, Walker, needed_by
from headrace.model.streams.stored_experts import without
from headrace.terms.errors import ModelError
from headrace.terms.layout import UnitLayout

# So many micro-batches wait within a block together, and an expert comes once for all of them.
TOGETHER = 8

Context = Callable[[int], AbstractContextManager[Any]]


class BlockWeights(Protocol):
    """A block's weights. `rounded` takes the rounded values, by parameter; `places` has the block's matrices by place."""

    rounded: Mapping[str, Rounding]
    places: Mapping[Place, Matrix]

    def use(self, *, rounded: bool) -> None:
        """Bind the weights as they came, or rounded."""

    def run(
        self,
        items: Sequence[int],
        run: Callable[[int], torch.Tensor],
        context: Context,
        take: Callable[[int, torch.Tensor], None],
        wanted: frozenset[int] | None = None,
    ) -> None:
        """Run the block on `items`, each within its `context`, and give `take` each item's result.

        If only some experts are `wanted`, the results are meaningless.
        """

    def close(self) -> None:
        """Release the weights."""


class WholeBlock:
    """A whole block, twice in memory: as it `came`, and rounded."""

    def __init__(self, chain: Chain, unit: int, came: torch.Tensor) -> None:
        self._chain, self._unit, layout = chain, unit, chain.layouts[unit]
        self._came, self._rounded = came, came.clone()
        self.rounded: Mapping[str, Rounding] = _views(layout, self._rounded)
        self.places: Mapping[Place, Matrix] = {}

    def use(self, *, rounded: bool) -> None:
        """See `BlockWeights`."""
        self._chain.bind(self._unit, self._rounded if rounded else self._came, None)
        specs = self._chain.layouts[self._unit].parameters
        self.places = matrices_of({spec.name: self._chain.model.get_parameter(spec.name) for spec in specs})

    def run(
        self,
        items: Sequence[int],
        run: Callable[[int], torch.Tensor],
        context: Context,
        take: Callable[[int, torch.Tensor], None],
        wanted: frozenset[int] | None = None,
    ) -> None:
        """See `BlockWeights`."""
        for item in items:
            with context(item):
                out = run(item)
            take(item, out)

    def close(self) -> None:
        """See `BlockWeights`."""
        self._chain.release(self._unit)


class BlockByExperts:
    """What every token reads of a block, twice in memory (`came`), and one of its `experts`; rounded ones lie in `file`."""

    def __init__(
        self, chain: Chain, weights: WeightMap, unit: int, experts: BlockExperts, came: torch.Tensor, file: Path
    ) -> None:
        self._chain, self._weights, self._experts, self._file = chain, weights, experts, file
        names = frozenset(experts.names.values())
        layout = without(chain.layouts[unit], names)
        self._came, self._common = came, came.clone()
        self._binding = Binding(chain.model, [layout], chain.dtype)
        self._specs = {spec.name: spec for spec in chain.layouts[unit].parameters if spec.name in names}
        self._banks = Banks([experts], chain.dtype, chain.device)
        self._banks.install()
        self._slots = {
            name: torch.empty(spec.shape[1:], dtype=chain.dtype, device=chain.device) for name, spec in self._specs.items()
        }
        self._nothing = {name: torch.zeros_like(slot) for name, slot in self._slots.items()}
        self._is_rounded = False
        self._kept = {
            name: _Kept(file.with_name(f"{file.name}-{place}"), experts.num_experts, slot)
            for place, (name, slot) in enumerate(self._slots.items())
        }
        self.rounded: Mapping[str, Rounding] = {**_views(layout, self._common), **self._kept}
        self._layout = layout
        self._known: dict[Place, Matrix] = {}
        self.places: Mapping[Place, Matrix] = {}

    def use(self, *, rounded: bool) -> None:
        """See `BlockWeights`."""
        self._is_rounded = rounded
        self._binding.bind(0, self._common if rounded else self._came, None)
        parameters = {spec.name: self._chain.model.get_parameter(spec.name) for spec in self._layout.parameters}
        self.places = self._known = matrices_of(parameters)

    def run(
        self,
        items: Sequence[int],
        run: Callable[[int], torch.Tensor],
        context: Context,
        take: Callable[[int, torch.Tensor], None],
        wanted: frozenset[int] | None = None,
    ) -> None:
        """See `BlockWeights`. Experts that are not wanted are not read: any numbers stand for them.

        A few micro-batches run the block's own code at once, each in a thread, one thread at a time. All wait at their experts
        (`model/parts/banks.py`), which come in ascending order, each once for all. Invariant: each expert sees the
        micro-batches in their order, as if each ran alone.

        Raises:
            ModelError: the block asks for an expert after a larger one.
        """

        def through(item: int) -> torch.Tensor:
            with torch.no_grad(), self._chain.arithmetic(), context(item):
                return run(item)

        for start in range(0, len(items), TOGETHER):
            some = items[start : start + TOGETHER]
            with contextlib.ExitStack() as closers:
                walks = [_Walk(self._banks, partial(through, item)) for item in some]
                for walk in walks:
                    closers.callback(walk.close)
                inside = [walk for walk in walks if not walk.go_on()]
                for expert in needed_by(walks):
                    weights = self._load(expert, wanted is None or expert in wanted)
                    inside = self._banks.let_pass({expert: weights}, inside, _Walk.go_on)
                if late := sorted({walk.wants for walk in inside}):
                    name = type(self._experts.module).__name__
                    raise ModelError(f"{name}: asks for experts {late[:4]} after larger ones")
                for item, walk in zip(some, walks, strict=True):
                    assert walk.out is not None, "it is through"
                    take(item, walk.out)

    def close(self) -> None:
        """See `BlockWeights`."""
        self._banks.remove()
        self._binding.release(0)
        for kept in self._kept.values():
            kept.close()

    def _load(self, expert: int, wanted: bool) -> Mapping[str, torch.Tensor]:
        if not wanted:
            return {attribute: self._nothing[name] for attribute, name in self._experts.names.items()}
        for name, slot in self._slots.items():
            kept = self._kept[name]
            if self._is_rounded and expert in kept.written:
                slot.copy_(kept.read(expert))
            else:
                pieces = self._weights.pieces[name]
                slot.copy_(stored_matrix(self._weights, pieces, (slot.shape[-2], slot.shape[-1]), expert))
            place = slot.data_ptr(), (slot.shape[-2], slot.shape[-1])
            self._known[place] = Matrix(name, expert, place[1])
        return {attribute: self._slots[name] for attribute, name in self._experts.names.items()}


class _Kept:
    """Rounded experts in a file: written and read one at a time. The file is not mapped: its pages would be this process's."""

    def __init__(self, path: Path, experts: int, like: torch.Tensor) -> None:
        self.device, self.written = like.device, set[int]()
        self._path, self._dtype = path, like.dtype
        self._file = HiddenRows(path, [like.shape] * experts)

    def read(self, expert: int) -> torch.Tensor:
        """Return the rounded weights of an expert."""
        return self._file.read(expert)

    def put(self, expert: int | None, values: torch.Tensor) -> None:
        """Keep the rounded weights of an expert."""
        assert expert is not None, "one of a stack"
        self._file.write(expert, values.to(self._dtype))
        self.written.add(expert)

    def close(self) -> None:
        """Remove the file."""
        self._file.close()
        self._path.unlink(missing_ok=True)


class _View:
    """A parameter in memory."""

    def __init__(self, place: torch.Tensor) -> None:
        self.device, self._place = place.device, place

    def put(self, expert: int | None, values: torch.Tensor) -> None:
        """Put the rounded values of a matrix in its place."""
        (self._place if expert is None else self._place[expert]).copy_(values)


def _views(layout: UnitLayout, flat: torch.Tensor) -> dict[str, Rounding]:
    return {
        spec.name: _View(flat[spec.offset : spec.offset + spec.num_elements].view(spec.shape)) for spec in layout.parameters
    }


# So many micro-batches wait within a block together, and an expert comes once for all of them.
TOGETHER = 8


class _Walk(Walker):
    """One micro-batch on its way through a block, in a thread of its own."""

    def __init__(self, banks: Banks, run: Callable[[], torch.Tensor]) -> None:
        self.out: torch.Tensor | None = None
        self._banks, self._run = banks, run
        self._thread = ParkedThread(self._walk, "headrace rows")
        super().__init__(self._thread.park)

    def go_on(self) -> bool:
        """Let it run until it wants an expert or ends; return whether it ended. Raises whatever its code raises."""
        self._thread.go_on()
        return self.out is not None

    def close(self) -> None:
        """End it where it is."""
        self._thread.close()

    def _walk(self) -> None:
        self._banks.visit(self)
        self.out = self._run()
