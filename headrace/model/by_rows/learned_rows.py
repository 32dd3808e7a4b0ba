"""Tables that are trained by rows, the embedding and those in blocks: a pass gets the rows that it asks for from a source, and
hands it their gradients.

Invariant: hidden states and gradients have the bits of the whole table's. A row is rounded as the table would be, and the
library adds the gradients of its tokens in the order in which it does for the whole table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from headrace.model.by_rows.embedding_rows import embedding_rows_of, put_rows
from headrace.model.chain.chain import Chain
from headrace.model.parts.stored_rows import StoredRows, rows_within
from headrace.terms.embedding_rows import TableFigures
from headrace.terms.errors import ConfigError
from headrace.terms.layout import UnitLayout
from headrace.terms.split_master import upper_half


class LearnedRowSource(Protocol):
    """Gives the newest rows of a unit's table, and takes the gradients of rows."""

    def gather(self, unit: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return rows `ids`, which ascend: (n, width)."""

    def add(self, unit: int, ids: NDArray[np.int64], gradient: NDArray[np.float32]) -> None:
        """Add the gradients of rows `ids` to those that came before in this step."""


class LearnedRows(StoredRows):
    """Stands in the place of a table, whose rows its source has once it is served; until then nothing is run.

    Where gradients are taken, the source gets those of rows. `place` is its unit, and the parameter that it is of a block.
    """

    learns: ClassVar[bool] = True

    def __init__(
        self,
        table: nn.Embedding,
        dtype: torch.dtype,
        whole: UnitLayout,
        taking_back: Callable[[], None],
        place: tuple[int, str] = (0, ""),
    ) -> None:
        super().__init__(table, None, dtype, whole, taking_back)
        self._source: LearnedRowSource | None = None
        self._unit, self.name = place
        self._padding = table.padding_idx

    def serve(self, source: LearnedRowSource) -> None:
        """Take rows from `source` from here on."""
        self._source = source

    @property
    def _has_numbers(self) -> bool:
        return self._source is not None

    def _looked_up(self, wanted: torch.Tensor, places: torch.Tensor, device: torch.device) -> torch.Tensor:
        source, unit, ids = self._source, self._unit, wanted.numpy()
        assert source is not None, "the caller looked"
        rows = _as_computed(torch.from_numpy(source.gather(unit, ids)), self._dtype).to(device)
        if torch.is_grad_enabled():

            def hand_over(found: torch.Tensor) -> None:
                assert found.grad is not None, "it was just accumulated"
                source.add(unit, ids, found.grad.float().cpu().numpy())
                found.grad = None

            rows.requires_grad_().register_post_accumulate_grad_hook(hand_over)  # type: ignore[no-untyped-call]
        padding = None if self._padding is None else int(np.searchsorted(ids, self._padding))
        if padding is not None and not (padding < ids.size and ids[padding] == self._padding):
            padding = None
        return F.embedding(places.to(device), rows, padding)


@dataclass(frozen=True, slots=True)
class LearnedTable:
    """A table that is trained by rows: its `figures`, the factor of the learning rate, and the weight decay.

    It is the parameter `name`, in a block one of those that `whole` lays out. An embedding is all of its unit.
    """

    figures: TableFigures
    group: tuple[float, float]
    name: str
    whole: UnitLayout | None = None

    @classmethod
    def of(cls, chain: Chain) -> "LearnedTable":
        """Return the embedding of `chain`.

        Raises:
            ConfigError: its rows cannot be updated one by one.
        """
        table, found = chain.model.get_input_embeddings(), embedding_rows_of(chain, None)
        if chain.tied:
            raise ConfigError(
                "gradient: rows: the head has the weights of the embedding, and its gradient is whole; give dense"
            )
        if found is None or table.scale_grad_by_freq or table.sparse:
            raise ConfigError(
                f"gradient: rows: the embedding ({type(table).__name__}) is no plain table that is all of its unit; give dense"
            )
        layout = chain.layouts[0]
        figures = TableFigures(rows=found.rows, width=int(table.weight.shape[1]), top=1)
        name = layout.parameters[0].name
        return cls(figures, _group_of(layout, name), name=name)

    @classmethod
    def in_blocks(cls, chain: Chain) -> "dict[int, LearnedTable]":
        """Return the tables in blocks whose rows `chain` takes from a source, by unit. What a token asks for is left open."""
        found = {}
        for unit, block in enumerate(chain.runner.blocks, start=1):
            for rows in rows_within(block):
                if isinstance(rows, LearnedRows):
                    figures = TableFigures(rows=rows.weight.shape[0], width=rows.weight.shape[1], top=0)
                    found[unit] = cls(figures, _group_of(rows.whole, rows.name), rows.name, rows.whole)
        return found


def learn_rows(chain: Chain, source: LearnedRowSource) -> LearnedRows:
    """Take the rows of a chain's embedding from `source` from here on: unit 0 is without it. Return what takes them."""

    def make(table: nn.Embedding, whole: UnitLayout, taking_back: Callable[[], None]) -> LearnedRows:
        return LearnedRows(table, chain.dtype, whole, taking_back)

    rows = put_rows(chain, make)
    rows.serve(source)
    return rows


def _as_computed(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows as compute reads them. In bfloat16 they are the upper halves of their masters (`terms.split_master`)."""
    if dtype != torch.bfloat16:
        return master.to(dtype)
    high: torch.Tensor = upper_half(master.view(torch.int32))
    return high.to(torch.int16).view(torch.bfloat16)


def _group_of(layout: UnitLayout, name: str) -> tuple[float, float]:
    """Return the factor of the learning rate and the weight decay of a parameter."""
    group = layout.groups[next(spec.group for spec in layout.parameters if spec.name == name)]
    return group.learning_rate_scale, group.weight_decay
