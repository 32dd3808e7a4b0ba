"""Tables in the blocks of a run that trains beside frozen weights: large ones stay in the model's files.

Invariant: losses and what is trained have the bits of whole blocks. The files that the run began with are read.
"""

from typing import Any

from headrace.engine.lent_base import TABLES, marks_of
from headrace.model import Chain, WeightMap
from headrace.model.block_tables import TakenTables, is_large, tables_of, take_tables


class Tables:
    """The tables in blocks of `chain`, with whole layouts. `frozen`: blocks are not trained, and no other process has a part.

    `every` of them is taken out of its block, or the large ones.
    """

    def __init__(self, chain: Chain, weights: WeightMap, *, frozen: bool, every: bool) -> None:
        self._chain = chain
        self._found = tables_of(chain, weights) if frozen else ()
        large = [each for each in self._found if every or is_large(each)]
        self._taken = take_tables(chain, large)

    def take_rest(self) -> bool:
        """Take all that are still in their blocks; return whether there were any. To be called before there is a store."""
        rest = [each for each in self._found if each not in self._taken.tables]
        more = take_tables(self._chain, rest)
        self._taken = TakenTables((*self._taken.tables, *more.tables), (*self._taken.rows, *more.rows))
        return bool(rest)

    @property
    def identity(self) -> dict[str, Any]:
        """What a run's state says of the files in which rows are read."""
        return {TABLES: marks_of(self._taken.paths)} if self._taken.tables else {}

    @property
    def bytes_read(self) -> int:
        """Bytes of rows that were read so far."""
        return self._taken.bytes_read
