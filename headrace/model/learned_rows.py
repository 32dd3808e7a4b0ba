"""An embedding that is trained by rows: a pass reads those of its tokens from a source, and hands their gradients over to it.

Invariant: hidden states and gradients have the bits of the whole table's. A row is rounded as the table would be, and the
library adds the gradients of its tokens in the order in which it does for the whole table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from headrace.model.chain import Chain
from headrace.model.embedding_rows import put_rows, rows_of
from headrace.model.stored_rows import StoredRows
from headrace.terms.errors import ConfigError
from headrace.terms.layout import UnitLayout
from headrace.terms.row_table import TableFigures


class RowSource(Protocol):
    """Gives the newest rows of a unit's table, and takes the gradients of rows."""

    def gather(self, unit: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return rows `ids`, which ascend: (n, width)."""

    def add(self, unit: int, ids: NDArray[np.int64], gradient: NDArray[np.float32]) -> None:
        """Add the gradients of rows `ids` to those that came before in this step."""


class LearnedRows(StoredRows):
    """Stands in the place of an embedding whose rows `source` has. Where gradients are taken, it gets those of rows."""

    def __init__(
        self,
        table: nn.Embedding,
        source: RowSource,
        dtype: torch.dtype,
        whole: UnitLayout,
        taking_back: Callable[[], None],
    ) -> None:
        super().__init__(table, None, dtype, whole, taking_back)
        self._source, self._padding = source, table.padding_idx

    @property
    def _has_numbers(self) -> bool:
        return True

    def _looked_up(self, wanted: torch.Tensor, places: torch.Tensor, device: torch.device) -> torch.Tensor:
        source, ids = self._source, wanted.numpy()
        rows = torch.from_numpy(source.gather(0, ids)).to(device, self._dtype)
        if torch.is_grad_enabled():

            def hand_over(found: torch.Tensor) -> None:
                assert found.grad is not None, "it was just accumulated"
                source.add(0, ids, found.grad.float().cpu().numpy())
                found.grad = None

            rows.requires_grad_().register_post_accumulate_grad_hook(hand_over)  # type: ignore[no-untyped-call]
        padding = None if self._padding is None else int(np.searchsorted(ids, self._padding))
        if padding is not None and not (padding < ids.size and ids[padding] == self._padding):
            padding = None
        return F.embedding(places.to(device), rows, padding)


@dataclass(frozen=True, slots=True)
class LearnedTable:
    """The embedding of a chain as a table: its `figures`, the factor of the learning rate, and the weight decay."""

    figures: TableFigures
    group: tuple[float, float]

    @classmethod
    def of(cls, chain: Chain) -> "LearnedTable":
        """Return the embedding of `chain`.

        Raises:
            ConfigError: its rows cannot be updated one by one.
        """
        table, found = chain.model.get_input_embeddings(), rows_of(chain, None)
        if chain.tied:
            raise ConfigError(
                "gradient: rows: the head has the weights of the embedding, and its gradient is whole; give dense"
            )
        if found is None or table.scale_grad_by_freq or table.sparse:
            raise ConfigError(
                f"gradient: rows: the embedding ({type(table).__name__}) is no plain table that is all of its unit; give dense"
            )
        layout = chain.layouts[0]
        group = layout.groups[layout.parameters[0].group]
        figures = TableFigures(rows=found.rows, width=int(table.weight.shape[1]), top=1)
        return cls(figures, (group.learning_rate_scale, group.weight_decay))


def learn_rows(chain: Chain, source: RowSource) -> LearnedRows:
    """Take the rows of a chain's embedding from `source` from here on: unit 0 is without it. Return what takes them."""

    def make(table: nn.Embedding, whole: UnitLayout, taking_back: Callable[[], None]) -> LearnedRows:
        return LearnedRows(table, source, chain.dtype, whole, taking_back)

    return put_rows(chain, make)
