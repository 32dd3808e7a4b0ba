"""The embedding of a run: whole where compute reads it, or by rows, as the plan says.

Rows of a frozen one are read in the model's files; those of a trained one begin there, and then are a table's
(`update.tables.table_rows`).

Invariant: units, state and exports are the same either way; only the slot that compute reads is empty where rows are read.
"""

from pathlib import Path
from typing import Any

from headrace.engine.lent_base import ROWS, marks_of
from headrace.model import Chain, WeightMap
from headrace.model.by_rows.embedding_rows import (
    embedding_rows_of,
    has_own_head,
    read_embedding_rows,
    stored_table,
    take_back,
    with_table,
)
from headrace.model.by_rows.learned_rows import learn_rows
from headrace.model.parts.stored_rows import RowReader, StoredRows
from headrace.plan.value.plan import Plan
from headrace.terms.errors import ConfigError
from headrace.update.tables.table_rows import FirstRows, TableRows


class Embedding:
    """The embedding of `chain`, with whole layouts. `rows` are its figures if they can be read one by one (`alone`: no other
    process has a part of the run), None where they cannot. `own_head`: whether all of the head is here, in a unit of its own.
    """

    def __init__(self, chain: Chain, weights: WeightMap, *, alone: bool) -> None:
        self._chain, self._weights = chain, weights
        self.rows = embedding_rows_of(chain, weights) if alone else None
        self.own_head = alone and has_own_head(chain)
        self._path: Path | None = stored_table(chain, weights).path if self.rows is not None else None
        self._readers: list[StoredRows | RowReader] = []
        self._learned: TableRows | None = None

    def first_rows(self, unit: int) -> FirstRows:
        """Return what reads the rows with which a trained embedding begins.

        Raises:
            ConfigError: they cannot be read one by one.
        """
        self.refuse_whole()
        self._readers.append(reader := RowReader(stored_table(self._chain, self._weights)))
        return lambda ids: reader.read(ids.tolist()).float().numpy()

    def refuse_whole(self) -> None:
        """Raise ConfigError if rows of the model's files cannot be read one by one, or the run has other processes."""
        if self.rows is None:
            raise ConfigError(
                "gradient: rows: the embedding is coded in the model's files, or several machines train; give dense"
            )

    def learn(self, rows: TableRows) -> None:
        """Take the rows of a trained embedding from `rows`."""
        self._learned = rows

    def place(self, plan: Plan) -> None:
        """Have the embedding where `plan` says, from here on."""
        take_back(self._chain)
        if plan.embedding is not None and plan.embedding.learns:
            assert self._learned is not None, "the rows of a trained embedding are open"
            learn_rows(self._chain, self._learned)
        elif plan.embedding is not None:
            self._readers.append(read_embedding_rows(self._chain, self._weights))

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
