"""The frozen embedding of a run: whole where compute reads it, or by rows that are read in the model's files, as the plan says.

Invariant: units, state and exports are the same either way; only the slot that compute reads is empty where rows are read.
"""

from pathlib import Path
from typing import Any

from headrace.engine.lent_base import ROWS, marks_of
from headrace.model import Chain, WeightMap
from headrace.model.embedding_rows import has_own_head, read_rows, rows_of, stored_table, take_back, with_table
from headrace.model.stored_rows import StoredRows
from headrace.plan.plan import Plan


class Embedding:
    """The embedding of `chain`, with whole layouts. `rows` are its figures if they can be read one by one (`alone`: no other
    process has a part of the run), None where they cannot. `own_head`: whether all of the head is here, in a unit of its own.
    """

    def __init__(self, chain: Chain, weights: WeightMap, *, alone: bool) -> None:
        self._chain, self._weights = chain, weights
        self.rows = rows_of(chain, weights) if alone else None
        self.own_head = alone and has_own_head(chain)
        self._path: Path | None = stored_table(chain, weights).path if self.rows is not None else None
        self._readers: list[StoredRows] = []

    def place(self, plan: Plan) -> None:
        """Have the embedding where `plan` says, from here on."""
        take_back(self._chain)
        if plan.embedding is not None:
            self._readers.append(read_rows(self._chain, self._weights))

    def whole(self, chain: Chain) -> Chain:
        """Return `chain` with all of unit 0, not to be run."""
        return with_table(chain)

    def identity(self, plan: Plan | None) -> dict[str, Any]:
        """Return what a run's state says of the file in which rows are read; nothing where `plan` reads none."""
        if self._path is None or (plan is not None and plan.embedding is None):
            return {}
        return {ROWS: marks_of((self._path,))}

    @property
    def bytes_read(self) -> int:
        """Bytes of rows that were read so far."""
        return sum(reader.bytes_read for reader in self._readers)
