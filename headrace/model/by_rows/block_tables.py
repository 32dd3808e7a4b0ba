"""Tables within blocks, such as an embedding of n-grams, out of their units: a block reads the rows that it asks for.

A table is an embedding in a block that nothing else uses; that is tried on a tiny instance. A pass asks for few of its rows, so
its block comes without it. Rows of a frozen one stay in the file; those of a trained one are a run's (`learned_rows`).
Invariant: hidden states have the bits of the whole table (`stored_rows`), and so have gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn
from transformers.core_model_loading import Concatenate

from headrace.model.blocks.binding import parameter_owners
from headrace.model.by_rows.learned_rows import LearnedRows
from headrace.model.by_rows.table_check import holder_of, is_table, why_not_trained, why_whole_tables
from headrace.model.chain.chain import Chain
from headrace.model.directory.matching import WeightMap
from headrace.model.parts.stored_rows import ROW_DTYPES, StoredRows, rows_within
from headrace.model.stored.safetensors_file import StoredTensor
from headrace.model.streams.stored_experts import without
from headrace.terms.embedding_rows import BlockRows, EmbeddingRows
from headrace.terms.layout import FROZEN, PARAMETER_ALIGNMENT, realigned
from headrace.terms.sizes import GIB

# From so many bytes on, in the dtype of compute, a table never comes with its block. To read so much of a drive takes as long
# as the rows of some 20,000 tokens (docs/log/embedding-rows).
LEAST_BYTES = GIB


@dataclass(frozen=True, slots=True)
class BlockTable:
    """An embedding in the block of `unit`, whose weight is the parameter `name`, (rows, width) in the dtype of compute.

    `stored` says where its rows lie (see `RowReader`); None: no files were asked. If it `learns`, they are trained.
    """

    unit: int
    name: str
    figures: EmbeddingRows
    stored: tuple[StoredTensor, ...] | None
    learns: bool = False


@dataclass(frozen=True)
class TakenTables:
    """Tables that are out of the units of a chain; `rows` stand in their places."""

    tables: tuple[BlockTable, ...] = ()
    rows: tuple[StoredRows, ...] = ()

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files in which they lie."""
        return tuple(dict.fromkeys(part.path for each in self.tables for part in each.stored or ()))

    @property
    def bytes_read(self) -> int:
        """Bytes of rows that were read so far."""
        return sum(rows.bytes_read for rows in self.rows)


def is_large(table: BlockTable) -> bool:
    """Return whether a table stays in its file wherever that is possible: a pass would rather read a few of its rows."""
    return table.figures.whole_bytes >= LEAST_BYTES


def block_tables_of(chain: Chain, weights: WeightMap | None) -> tuple[BlockTable, ...]:
    """Return the tables in blocks of a chain, whose rows are stored one after another; without `weights` no files are asked.

    There are none where blocks do not run by the model's own code, or a tiny instance had other bits with rows.
    """
    owners, found = parameter_owners(chain.model), list[BlockTable]()
    for unit, layout in enumerate(chain.layouts[1 : chain.num_blocks + 1], start=1) if chain.replayable else ():
        for spec in layout.parameters:
            (module, _), *others = owners[spec.name]
            if others or not is_table(module):
                continue
            stored = None if weights is None else _stored(weights, spec.name)
            if stored is not None and not stored:
                continue
            rows, width = spec.shape
            dtype = ROW_DTYPES[stored[0].dtype] if stored else chain.dtype
            stored_bytes, computed_bytes = width * dtype.itemsize, width * chain.dtype.itemsize
            figures = EmbeddingRows(rows=rows, stored_bytes=stored_bytes, computed_bytes=computed_bytes)
            found.append(BlockTable(unit, spec.name, figures, stored))
    return () if not found or why_whole_tables(chain.config) else tuple(found)


def trained_tables_of(chain: Chain, weights: WeightMap | None) -> tuple[BlockTable, ...]:
    """Return those of `block_tables_of` that can be trained by rows: of each block the largest. Its unit keeps the others."""
    found = dict[int, BlockTable]()
    for table in sorted(block_tables_of(chain, weights), key=lambda each: each.figures.whole_bytes):
        specs = {spec.name: spec for spec in chain.layouts[table.unit].parameters}
        module = chain.model.get_submodule(table.name.rpartition(".")[0])
        if specs[table.name].kind != FROZEN and not (module.scale_grad_by_freq or module.sparse):
            found[table.unit] = replace(table, learns=True)
    return () if not found or why_not_trained(chain.config) else tuple(found[unit] for unit in sorted(found))


def take_tables(chain: Chain, tables: Sequence[BlockTable]) -> TakenTables:
    """Read the rows of `tables` as blocks ask for them, from here on: units are without them. Nothing is bound."""
    return TakenTables(tuple(tables), tuple(_taken(chain, each) for each in tables))


def by_rows(chain: Chain) -> tuple[BlockRows, ...]:
    """Return the tables in blocks of a chain that are read by rows; how many a token asks for is left open."""
    blocks = enumerate(chain.runner.blocks, start=1)
    return tuple(BlockRows(unit=unit, table=rows.figures) for unit, block in blocks for rows in rows_within(block))


def take_as(known: Chain, chain: Chain, weights: WeightMap | None) -> None:
    """Read by rows in `chain` what is so read in `known`, another chain of the model."""
    found = block_tables_of(chain, weights)
    places = [holder_of(known.model, table.name) for table in found]
    taken = [parent._modules[attribute] for parent, attribute in places]
    kept = [(table, rows) for table, rows in zip(found, taken, strict=True) if isinstance(rows, StoredRows)]
    take_tables(chain, [replace(table, learns=rows.learns) for table, rows in kept])


def _taken(chain: Chain, table: BlockTable) -> StoredRows:
    """Put rows in the place of a table."""
    layouts, unit = chain.layouts, table.unit
    parent, attribute = holder_of(chain.model, table.name)
    module, whole = parent._modules[attribute], layouts[unit]
    assert isinstance(module, nn.Embedding), "it is a table"

    def taking_back() -> None:
        parent._modules[attribute] = module
        chain.lay_out((*chain.layouts[:unit], whole, *chain.layouts[unit + 1 :]))

    names = frozenset({table.name})
    if table.learns:
        rows: StoredRows = LearnedRows(module, chain.dtype, whole, taking_back, (unit, table.name))
        rest = realigned(whole, PARAMETER_ALIGNMENT, names)
    else:
        rows, rest = StoredRows(module, table.stored, chain.dtype, whole, taking_back), without(whole, names)
    parent._modules[attribute] = rows
    chain.lay_out((*layouts[:unit], rest, *layouts[unit + 1 :]))
    return rows


def stored_rows_of(weights: WeightMap, name: str) -> Iterator[tuple[str, int, int]]:
    """Yield which rows of the table `name` each tensor has that it is stored as, or is a copy of it: from row, up to row."""
    start = 0
    for part in _stored(weights, name):
        yield part.key, start, start + part.shape[0]
        start += part.shape[0]
    yield from ((copy.key, 0, start) for copy in weights.copies.get(name, ()))


def _stored(weights: WeightMap, name: str) -> tuple[StoredTensor, ...]:
    """Return the stored tensors that a parameter is, one below the other; () if it is coded, or made in another way."""
    keys = [piece.key for piece in weights.pieces.get(name, ()) if piece.index == ()]
    for conversion in weights.conversions:
        joins = [type(each) is Concatenate and each.dim == 0 for each in conversion.converter.operations] == [True]
        if conversion.parameters == (name,) and joins and len(conversion.sources) == 1:
            keys = [key for several in conversion.sources.values() for key in several]
    found = tuple(weights.checkpoint.tensors[key] for key in keys)
    plain = all(each.coded is None and each.dtype in ROW_DTYPES and len(each.shape) == 2 for each in found)
    return found if plain and len({each.dtype for each in found}) == 1 else ()
