"""Full fine-tuning in which the embedding is a table of rows: a step reads, updates and writes those that its tokens name.

The other rows catch up when they are next read (`update.lazy_rows`). So weights, moments and losses have the bits of `dense`.
Rows lie in a file of their own beside the state, which has the embedding as it was when the run began.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from headrace.terms.errors import ConfigError
from headrace.terms.gradient import GradientWay
from headrace.terms.layout import UnitLayout, rest_of_master
from headrace.terms.optimizer import ALL, Optimizer
from headrace.terms.row_table import TableFigures
from headrace.update.lazy_rows import refuse_other_rules
from headrace.update.rules.table import rule_of
from headrace.update.table_rows import RowFamily, TableRows
from headrace.update.tensors import split
from headrace.update.wire import Content, Wire
from headrace.update.wires.dense import DenseWire

if TYPE_CHECKING:
    from headrace.model import Chain
    from headrace.model.export import UnitPlanes
    from headrace.model.learned_rows import LearnedTable


class Rows(GradientWay):
    """Whole gradients, but of the embedding those of the rows that a step touches. It has no settings."""

    name: ClassVar[str] = "rows"


def rows_in_place_of(wire: Wire, chain: "Chain", optimizer: Optimizer) -> "RowsWire":
    """Return the wire that trains what `wire` does, to the same bits, but the embedding of `chain` by rows.

    Raises:
        ConfigError: it cannot.
    """
    if not isinstance(wire, DenseWire):
        raise ConfigError(f"gradient: {wire.name} has no rows of its own; give dense")
    found = RowsWire(Rows(), wire.seed).of(chain)
    found.refuse(optimizer)
    return found


class RowsWire(Wire):
    """Everything is trained: the embedding by rows, the others in place."""

    ways = (Rows,)
    has_whole_state = False

    def __init__(self, settings: GradientWay | None = None, seed: int = 0, known: "LearnedTable | None" = None) -> None:
        super().__init__(settings, seed)
        self._known, self._rows = known, list[TableRows]()

    def of(self, chain: "Chain") -> "RowsWire":
        """Return the wire for `chain`; itself, if it knows that.

        Raises:
            ConfigError: the rows of its embedding cannot be updated one by one.
        """
        from headrace.model.learned_rows import LearnedTable

        return self if self._known is not None else RowsWire(self.settings, self.seed, LearnedTable.of(chain))

    @property
    def _table(self) -> "LearnedTable":
        assert self._known is not None, "the embedding of a chain is known"
        return self._known

    def trained(self, unit: int, layout: UnitLayout, *, is_block: bool) -> UnitLayout | None:
        """Return that all is trained in place, but for the embedding, whose rows are a table."""
        return None if unit == 0 else layout

    def table(self, unit: int) -> TableFigures | None:
        """Return what a plan knows of the embedding."""
        return self._table.figures if unit == 0 else None

    @property
    def row_families(self) -> Mapping[int, RowFamily]:
        """The embedding, which begins as it is in the model's files."""
        figures = self._table.figures
        return {0: RowFamily(figures.rows, figures.width, *self._table.group, stored=True, gradient_dtype=None)}

    def serve(self, rows: TableRows) -> None:
        """Export `rows`."""
        self._rows[:] = [rows]

    def refuse(self, optimizer: Optimizer) -> None:
        """Refuse rules that cannot catch up or keep no master, and to train no embedding."""
        if optimizer.train != ALL:
            raise ConfigError(f"gradient: rows trains the embedding, and train: {optimizer.train} does not; give dense")
        refuse_other_rules(rule_of(optimizer, "float32"))
        if rest_of_master(rule_of(optimizer, "bfloat16").planes.states) is None:
            raise ConfigError("gradient: rows have a float32 master, and this rule keeps none: use lomo, or give dense")

    def export(self, content: Content, directory: Path) -> None:
        """Write the newest weights as an ordinary Hugging Face directory. All rows catch up for it; nothing of that is kept."""
        from headrace.model import Exporter, exact_units

        read, layout = content.reader(), content.chain.layouts[0]
        exactly = 0 in exact_units(content.chain, content.weights)

        def newest(unit: int) -> "UnitPlanes | None":
            return read(unit) if unit else self._planes(layout, content.chain.compute_dtype, exactly=exactly)

        Exporter(content.checkpoint, content.chain, directory, newest, notes=content.notes).write()

    def _planes(self, layout: UnitLayout, dtype: str, *, exactly: bool) -> "UnitPlanes":
        """Return the newest rows as the planes of the unit: weights as compute reads them, and what completes their master."""
        weights = torch.zeros(layout.num_elements, dtype=getattr(torch, dtype))
        kind = {"bfloat16": torch.int16, "float16": torch.float32}.get(dtype)
        rest = torch.zeros(layout.num_elements, dtype=kind) if kind is not None and exactly else None
        start = 0
        for found in self._rows[0].weights(0):
            piece = torch.from_numpy(np.ascontiguousarray(found)).reshape(-1)
            at = slice(start, start + piece.numel())
            high, low = split(piece) if dtype == "bfloat16" else (piece, piece)
            weights[at] = high.view(torch.bfloat16) if dtype == "bfloat16" else high
            if rest is not None:
                rest[at] = low
            start = at.stop
        bits = weights.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else weights.numpy()
        return bits, None if rest is None else rest.numpy()
