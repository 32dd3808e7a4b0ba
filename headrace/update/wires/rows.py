"""Full fine-tuning in which tables are trained by rows: a step reads, updates and writes those that its tokens ask for.

Tables are the embedding, and embeddings in blocks (`model.by_rows.block_tables`). The other rows catch up when they are next
read (`update.tables.lazy_rows`). So weights, moments and losses have the bits of `dense`. Rows lie in files of their own beside
the state. This has the embedding as it was when the run began, and blocks without their tables.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.terms.embedding_rows import TableFigures
from headrace.terms.errors import ConfigError
from headrace.terms.layout import UnitLayout, rest_of_master
from headrace.terms.options.declared import option
from headrace.terms.options.gradient import GradientWay
from headrace.terms.options.optimizer import ALL, Optimizer
from headrace.terms.options.option_kinds import OneOf
from headrace.terms.options.summing import SEQUENTIAL
from headrace.update.rules.table import rule_of
from headrace.update.rules.tensors import split
from headrace.update.tables.lazy_rows import refuse_other_rules
from headrace.update.tables.table_rows import RowFamily, TableRows
from headrace.update.wires.dense import DenseWire
from headrace.update.wires.wire import Content, Wire

if TYPE_CHECKING:
    from headrace.model import Chain
    from headrace.model.by_rows.learned_rows import LearnedTable
    from headrace.model.written.export import UnitPlanes

EVERY, BLOCKS = "every", "blocks"


@dataclass(frozen=True, kw_only=True)
class Rows(GradientWay):
    """Whole gradients, but of tables those of the rows that a step touches."""

    name: ClassVar[str] = "rows"

    tables: str = option(
        EVERY,
        OneOf((EVERY, BLOCKS)),
        row="which tables are trained by rows: `every`, that is the embedding and those in blocks; or those in `blocks` alone",
    )

    def begun(self, way: GradientWay) -> GradientWay:
        """See `GradientWay.begun`."""
        return way if isinstance(way, Rows) else self


def rows_in_place_of(wire: Wire, chain: "Chain", optimizer: Optimizer, gradient_sum: str, tables: str = EVERY) -> "RowsWire":
    """Return the wire that trains what `wire` does, to the same bits, but `tables` of `chain` by rows (see `Rows`).

    Raises:
        ConfigError: it cannot.
    """
    if gradient_sum != SEQUENTIAL:
        raise ConfigError(f"gradient_sum: rows add micro-batches in their order; leave {gradient_sum} out, or give dense")
    if not isinstance(wire, DenseWire | RowsWire):
        raise ConfigError(f"gradient: {wire.name} has no rows of its own; give dense")
    found = RowsWire(Rows(tables=tables), wire.seed).of(chain)
    found.refuse(optimizer)
    return found


class RowsWire(Wire):
    """Everything is trained: tables by rows, the rest in place. In blocks these are what `chain` takes from a source."""

    ways = (Rows,)
    has_whole_state = False

    def __init__(self, settings: GradientWay | None = None, seed: int = 0, chain: "Chain | None" = None) -> None:
        super().__init__(settings, seed)
        self._chain, self._rows, self._embedding = chain, list[TableRows](), dict[int, "LearnedTable"]()
        if chain is not None and self.has_embedding:
            from headrace.model.by_rows.learned_rows import LearnedTable

            self._embedding[0] = LearnedTable.of(chain)

    def of(self, chain: "Chain") -> "RowsWire":
        """Return the wire for `chain`; itself, if it knows that.

        Raises:
            ConfigError: the rows of its embedding cannot be updated one by one.
        """
        return self if self._chain is chain else RowsWire(self.settings, self.seed, chain)

    @property
    def has_embedding(self) -> bool:
        """Whether the embedding is one of the tables."""
        assert isinstance(self.settings, Rows), "its way is that of rows"
        return self.settings.tables == EVERY

    @property
    def _known(self) -> "Mapping[int, LearnedTable]":
        """The tables of the chain, by unit."""
        from headrace.model.by_rows.learned_rows import LearnedTable

        assert self._chain is not None, "the chain is known"
        return self._embedding | LearnedTable.in_blocks(self._chain)

    def trained(self, unit: int, layout: UnitLayout, *, is_block: bool) -> UnitLayout | None:
        """Return that all is trained in place, but for an embedding whose rows are a table."""
        return None if unit == 0 and self.has_embedding else layout

    def table(self, unit: int) -> TableFigures | None:
        """Return what a plan knows of a unit's table."""
        return known.figures if (known := self._known.get(unit)) else None

    @property
    def row_families(self) -> Mapping[int, RowFamily]:
        """The tables, which begin as they are in the model's files."""
        return {
            unit: RowFamily(
                table.figures.rows,
                table.figures.width,
                *table.group,
                stored=True,
                gradient_dtype=None,
                whole=table.whole,
                name=table.name,
            )
            for unit, table in self._known.items()
        }

    def serve(self, rows: TableRows) -> None:
        """Export `rows`."""
        self._rows[:] = [rows]

    def refuse(self, optimizer: Optimizer) -> None:
        """Refuse rules that cannot catch up or keep no master, and to train no tables."""
        if optimizer.train != ALL:
            raise ConfigError(f"gradient: rows trains the embedding, and train: {optimizer.train} does not; give dense")
        refuse_other_rules(rule_of(optimizer, "float32"))
        if rest_of_master(rule_of(optimizer, "bfloat16").planes.states) is None:
            raise ConfigError("gradient: rows have a float32 master, and this rule keeps none: use lomo, or give dense")

    def export(self, content: Content, directory: Path) -> None:
        """Write an ordinary Hugging Face directory with up-to-date rows. The run's files do not change."""
        from headrace.model import Exporter
        from headrace.model.by_rows.block_tables import stored_rows_of
        from headrace.model.written.export import ReadRows

        dtype, chain = content.chain.compute_dtype, content.chain

        def pieces(unit: int, begin: int, end: int) -> "Iterator[UnitPlanes]":
            return (_planes(rows, dtype) for rows in self._rows[0].weights(unit, begin, end))

        by_key = dict[str, ReadRows]()
        for unit, table in self._known.items():
            for key, begin, end in stored_rows_of(content.weights, table.name):
                by_key[key] = partial(pieces, unit, begin, end)
        Exporter(content.checkpoint, chain, directory, content.reader(), notes=content.notes, rows=by_key).write()


def _planes(rows: NDArray[np.float32], dtype: str) -> "UnitPlanes":
    """Return rows as compute reads them, and what completes their master."""
    if dtype == "float32":
        return rows, None
    if dtype == "float16":
        return rows.astype(np.float16), rows
    high, low = split(torch.from_numpy(np.ascontiguousarray(rows)))
    return high.numpy().view(np.uint16), low.numpy()
