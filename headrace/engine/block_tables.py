"""The tables in blocks of a run. Beside frozen blocks large ones stay in the model's files. Those of trained blocks are trained
by rows: they begin as the files have them, and then are the run's (`update.tables.table_rows`).

Invariant: losses and what is trained have the bits of whole blocks. The files that the run began with are read.
"""

from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import Any

from headrace.engine.lent_base import TABLES, marks_of
from headrace.model import Chain, WeightMap
from headrace.model.by_rows.block_tables import (
    BlockTable,
    TakenTables,
    block_tables_of,
    is_large,
    take_tables,
    trained_tables_of,
)
from headrace.model.by_rows.learned_rows import LearnedRows
from headrace.model.parts.stored_rows import RowReader
from headrace.terms.errors import ConfigError
from headrace.terms.options.optimizer import Optimizer
from headrace.update.tables.table_rows import FirstRows, TableRows
from headrace.update.wires import DenseWire
from headrace.update.wires.rows import BLOCKS, RowsWire, rows_in_place_of
from headrace.update.wires.wire import Wire


class Tables:
    """The tables in blocks of `chain`, with whole layouts, under a run's wire. `alone`: no other process has a part of it.

    `every` of them is taken out of its block. None, as a run begins: frozen ones if they are large, trained ones by rows.
    """

    def __init__(self, chain: Chain, weights: WeightMap, wire: Wire, *, alone: bool, every: bool | None) -> None:
        self._chain, self._frozen, by_rows = chain, wire.is_beside, isinstance(wire, RowsWire)
        of = block_tables_of if self._frozen else trained_tables_of
        self._found = of(chain, weights) if alone and (self._frozen or by_rows or isinstance(wire, DenseWire)) else ()
        every = by_rows if every is None else every
        self._taken = take_tables(chain, [each for each in self._found if every or (self._frozen and is_large(each))])
        self._readers: list[RowReader] = []

    def take_rest(self, wire: Wire, optimizer: Optimizer, gradient_sum: str) -> Wire | None:
        """Take all that are still in their blocks, and return the wire that trains the same. To be called before there is a
        store. None: there are none, or they cannot be trained by rows.
        """
        rest = [each for each in self._found if each not in self._taken.tables]
        if rest and not self._frozen:
            with suppress(ConfigError):
                return self._take(rest, rows_in_place_of(wire, self._chain, optimizer, gradient_sum, BLOCKS))
            return None
        return self._take(rest, wire) if rest else None

    def _take(self, tables: Sequence[BlockTable], wire: Wire) -> Wire:
        more = take_tables(self._chain, tables)
        self._taken = TakenTables((*self._taken.tables, *more.tables), (*self._taken.rows, *more.rows))
        return wire

    def first_rows(self, unit: int) -> FirstRows:
        """Return what reads the rows with which the trained table of a unit begins."""
        table = next(each for each in self._taken.tables if each.unit == unit)
        assert table.stored is not None, "a run has files"
        self._readers.append(reader := RowReader(*table.stored))
        return lambda ids: reader.read(ids.tolist()).float().numpy()

    def learn(self, rows: TableRows) -> None:
        """Take rows of trained tables from `rows`."""
        for each in self._taken.rows:
            if isinstance(each, LearnedRows):
                each.serve(rows)

    def whole(self, chain: Chain) -> Chain:
        """Return `chain` with trained tables among the parameters of their units, in the order of these: for their names."""
        found, layouts = copy(chain), list(chain.layouts)
        for table, rows in zip(self._taken.tables, self._taken.rows, strict=True):
            if table.learns:
                own = {spec.name: spec for spec in layouts[table.unit].parameters}
                named = (own.get(spec.name, spec) for spec in rows.whole.parameters)
                layouts[table.unit] = replace(layouts[table.unit], parameters=tuple(named))
        found.layouts = tuple(layouts)
        return found

    @property
    def identity(self) -> dict[str, Any]:
        """What a run's state says of the files in which rows are read."""
        return {TABLES: marks_of(self._taken.paths)} if self._taken.tables else {}

    @property
    def bytes_read(self) -> int:
        """Bytes of rows that were read in the model's files so far."""
        return self._taken.bytes_read + sum(reader.bytes_read for reader in self._readers)
