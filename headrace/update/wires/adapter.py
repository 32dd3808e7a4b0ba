"""What lies beside frozen blocks is trained, and nothing else: adapters and row tables (`model/adapters`).

The model's code is imported once a chain is there: choices that exclude one another are refused before transformers is loaded.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from headrace.terms.embedding_rows import TableFigures
from headrace.terms.errors import ConfigError
from headrace.terms.layout import UnitLayout, part
from headrace.terms.options.adapter import Dora, Lora
from headrace.terms.options.contradictions import refuse_adapters_and_parts
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.options.row_table import DENSE, EXACT, Table
from headrace.update.rules.table import rule_of
from headrace.update.tables.lazy_rows import refuse_other_rules
from headrace.update.tables.table_rows import RowFamily, TableRows
from headrace.update.wires.wire import Content, ReadTrained, Sink, Wire

if TYPE_CHECKING:
    from headrace.model import Chain, Checkpoint, WeightMap
    from headrace.model.adapters.row_tables import RowTables
    from headrace.model.blocks.beside import BesideKind, StoredBeside


@dataclass(frozen=True)
class BesideWire(Wire):
    """Trains what `settings` ask for beside blocks. Before `of` a chain is known, it has no more than a name."""

    is_beside = True

    settings: Lora | Table
    seed: int = 0
    adapters: "BesideKind | None" = None
    # First numbers from elsewhere, by unit and name, until they are taken.
    first: dict[int, Mapping[str, Tensor]] = field(default_factory=dict, compare=False)

    def of(self, chain: "Chain") -> Self:
        """Return the wire of what is beside a chain's blocks; itself, if it knows that.

        Raises:
            ConfigError: what is asked for has no place in these blocks.
        """
        return self if self.adapters is not None else type(self)(self.settings, self.seed, self._of(chain))

    def _of(self, chain: "Chain") -> "BesideKind":
        """Return what `settings` ask for beside the blocks of a chain."""
        raise NotImplementedError

    @property
    def known(self) -> "BesideKind":
        """What is beside blocks, once the chain is known."""
        assert self.adapters is not None, "the adapters of a chain are known"
        return self.adapters

    def refuse(self, optimizer: Optimizer) -> None:
        """Refuse to train some of a model's own parameters only: none of them is trained."""
        refuse_adapters_and_parts(optimizer.train)

    def trained(self, unit: int, layout: UnitLayout, *, is_block: bool) -> UnitLayout | None:
        """Return where the adapters of a unit lie; nothing else is trained."""
        return self.known.layouts.get(unit)

    @contextmanager
    def beside(self, unit: int, trained: UnitLayout, weights: Tensor, sink: Sink | None) -> Iterator[None]:
        """Let the block compute with its adapters in this context; see `BesideKind.bind`."""
        self.known.bind(unit, trained, weights, sink)
        try:
            yield
        finally:
            self.known.release(unit)

    def first_weights(self, unit: int, layout: UnitLayout, trained: UnitLayout, weights: Tensor) -> Tensor:
        """Return adapters that change nothing yet, or that are gone on from."""
        first = weights.new_empty(trained.num_elements)
        self.known.first(unit, trained, _views(layout, weights), first)
        for name, values in self.first.pop(unit, {}).items():
            _views(trained, first)[name].copy_(values)
        return first

    def complete(self, unit: int, layout: UnitLayout, slot: Tensor, trained: UnitLayout, weights: Tensor) -> None:
        """Merge a block's matrices with what its adapters learned, for export only."""
        self.known.merge(unit, _views(trained, weights), _views(layout, slot))

    def making_bytes(self, layout: UnitLayout) -> int:
        """Return the bytes of a block's adapters where compute reads them, if that is elsewhere; or the bytes for merging."""
        unit = next(unit for unit, own in self.known.layouts.items() if own.name == layout.name)
        return max(4 * self.known.layouts[unit].num_elements, self.known.merging_bytes(unit))

    def export_bytes(self, checkpoint: "Checkpoint") -> int:
        """Return the bytes of the files of what is beside blocks."""
        from headrace.model.adapters.beside_files import beside_file_bytes

        return beside_file_bytes(self.known)

    def stored(self, read_trained: ReadTrained) -> "StoredBeside":
        """Return the adapters and their newest tensors."""
        from headrace.model.blocks.beside import StoredBeside

        return StoredBeside(self.known, {unit: self._flat(read_trained, unit) for unit in self.known.layouts})

    def _flat(self, read_trained: ReadTrained, unit: int) -> Tensor:
        """Return a unit's tensors in the adapters' own layout: a rule may align parameters otherwise."""
        layout, found = self.known.layouts[unit], read_trained(unit)
        flat = torch.zeros(layout.num_elements, dtype=torch.float32)
        for spec in layout.parameters:
            part(flat, spec).copy_(found[spec.name])
        return flat


@dataclass(frozen=True)
class AdapterWire(BesideWire):
    """Trains LoRA or DoRA beside matrices, and exports PEFT's files."""

    ways = (Lora, Dora)

    def _of(self, chain: "Chain") -> "BesideKind":
        from headrace.model.adapters.adapters import Adapters

        assert isinstance(self.settings, Lora), "its ways are LoRA's"
        return Adapters.of(chain.model, chain.layouts, chain.num_blocks, self.settings, self.seed, chain.stored_type)

    def begun(self, chain: "Chain", weights: "WeightMap") -> Self:
        """Return the wire with the numbers of the adapter that it goes on from.

        Raises:
            ModelError: this has no files that can be read, or is of another model.
            ConfigError: it has other matrices than are to be trained.
        """
        from headrace.model.adapters.adapter_reading import read_adapters
        from headrace.model.adapters.adapters import Adapters

        assert isinstance(self.settings, Lora), "its ways are LoRA's"
        if self.settings.from_ is None:
            return self
        directory = Path(self.settings.from_)
        stored = read_adapters(directory, chain, weights)
        assert isinstance(stored.adapters, Adapters), "it reads them"
        assert isinstance(self.known, Adapters), "it made them"
        theirs, ours = stored.adapters.ranks_and_scales, self.known.ranks_and_scales
        if theirs != ours:
            name = min(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
            found, asked = theirs.get(name, "not there"), ours.get(name, "not trained")
            raise ConfigError(f"adapter: from: {name} is {asked}, and in {directory} it is {found}; leave the settings out")
        return replace(self, first={unit: _views(stored.adapters.layouts[unit], flat) for unit, flat in stored.flats.items()})

    def export(self, content: Content, directory: Path) -> None:
        """Write the adapters alone, as PEFT's files."""
        from headrace.model.adapters.adapter_files import write_adapters
        from headrace.model.adapters.adapters import Adapters

        read, adapters = partial(self._flat, content.read_trained), self.known
        assert isinstance(adapters, Adapters), "it made them"
        write_adapters(directory, adapters, content.chain, content.weights, read, content.notes)


@dataclass(frozen=True)
class RowTableWire(BesideWire):
    """Trains tables of rows beside feed-forward parts, and exports them with a module that loads them."""

    ways = (Table,)
    settings: Table

    def _of(self, chain: "Chain") -> "BesideKind":
        from headrace.model.adapters.row_tables import RowTables

        return RowTables.of(chain.model, chain.layouts, self.settings, self.seed)

    def refuse(self, optimizer: Optimizer) -> None:
        """Refuse, too, to update rows by a rule that cannot catch up."""
        super().refuse(optimizer)
        if self.settings.policy != DENSE:
            refuse_other_rules(rule_of(optimizer, "float32"))

    def table(self, unit: int) -> TableFigures | None:
        """Return what a plan knows of a unit's table."""
        return self._tables.table(unit)

    @property
    def row_families(self) -> Mapping[int, RowFamily]:
        """The tables, unless they are updated whole."""
        tables, replay = self._tables, self.settings.policy == EXACT
        units = tables.places if tables.by_rows else ()
        return {unit: RowFamily(self.settings.rows, tables.width, *tables.groups[unit], replay) for unit in units}

    def serve(self, rows: TableRows) -> None:
        """Let blocks compute with `rows`."""
        self._tables.serve(rows)

    def stored(self, read_trained: ReadTrained) -> "StoredBeside":
        """Return the tables and their newest values, all of them."""
        from headrace.model.blocks.beside import StoredBeside

        whole, flats = self._tables.whole(), dict[int, Tensor]()
        for unit, layout in whole.layouts.items():
            flats[unit] = torch.zeros(layout.num_elements, dtype=torch.float32)
            tensors = self._tables.tensors(unit, self._flat(read_trained, unit))
            for spec in layout.parameters:
                pieces = [torch.from_numpy(piece).flatten() for piece in tensors[spec.name]]
                torch.cat(pieces, out=part(flats[unit], spec))
        return StoredBeside(whole, flats)

    @property
    def _tables(self) -> "RowTables":
        from headrace.model.adapters.row_tables import RowTables

        tables = self.known
        assert isinstance(tables, RowTables), "it made them"
        return tables

    def export(self, content: Content, directory: Path) -> None:
        """Write the tables alone."""
        from headrace.model.adapters.row_table_files import write_tables

        read = partial(self._flat, content.read_trained)
        write_tables(directory, self._tables, content.chain, content.weights, read, content.notes)


def _views(layout: UnitLayout, flat: Tensor) -> Mapping[str, Tensor]:
    return {spec.name: part(flat, spec).view(spec.shape) for spec in layout.parameters}
