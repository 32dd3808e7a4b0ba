"""An embedding whose rows stay in the file: a pass reads those of its tokens, and no others.

For models that do not fit in memory, whose embedding is frozen and is not the head as well. A row of 8 KiB is read in some
100 microseconds; kept whole, the table of a large vocabulary takes a gigabyte, which then every pass reads of the blocks.
Invariant: hidden states have the bits of the whole table (`stored_rows`).
"""

from collections.abc import Callable
from copy import copy
from typing import TypeVar

from torch import nn

from headrace.model.chain.chain import Chain
from headrace.model.directory.matching import WeightMap
from headrace.model.parts.stored_rows import ROW_DTYPES, StoredRows
from headrace.model.stored.safetensors_file import StoredTensor
from headrace.model.streams.stored_experts import without
from headrace.terms.embedding_rows import EmbeddingRows
from headrace.terms.layout import UnitLayout
from headrace.terms.sizes import PAGE_BYTES, round_up

_Rows = TypeVar("_Rows", bound=StoredRows)


def has_rows(chain: Chain, weights: WeightMap | None) -> bool:
    """Return whether the embedding of a chain is a plain table that the head does not use, and nothing is computed beside it.

    With `weights` it must be stored so, too; None: files are not asked.
    """
    module = chain.model.get_input_embeddings()
    if type(module) is not nn.Embedding or module.max_norm is not None or chain.tied:
        return False
    if chain.adapters is not None and 0 in chain.adapters.layouts:
        return False
    return weights is None or _stored_table(weights, _name_of(chain)) is not None


def has_own_head(chain: Chain) -> bool:
    """Return whether the matrix of the head is in the last unit, and not the embedding's."""
    return chain.has_epilogue_unit and not chain.tied


def head_range_bytes(chain: Chain) -> int:
    """Return the bytes of a slot for a range of the head's rows, in whole pages; 0 where these cannot come one after the other.

    A loss of the routers asks the head for its dtype and place, so it stays there.
    """
    head = chain.model.get_output_embeddings()
    if not (has_own_head(chain) and chain.head_rows) or chain.runner.collects_asides or head is None:
        return 0
    row_bytes = head.weight[0].numel() * chain.dtype.itemsize
    return round_up(min(chain.head_rows, len(head.weight)) * row_bytes, PAGE_BYTES) + 2 * PAGE_BYTES


def embedding_rows_of(chain: Chain, weights: WeightMap | None) -> EmbeddingRows | None:
    """Return figures of the embedding if it has rows (`has_rows`) and is all of its unit; None where it is no such table."""
    if not has_rows(chain, weights) or [spec.name for spec in chain.layouts[0].parameters] != [_name_of(chain)]:
        return None
    rows, width = chain.model.get_input_embeddings().weight.shape
    stored = None if weights is None else _stored_table(weights, _name_of(chain))
    dtype = chain.dtype if stored is None else ROW_DTYPES[stored.dtype]
    return EmbeddingRows(rows=rows, stored_bytes=width * dtype.itemsize, computed_bytes=width * chain.dtype.itemsize)


def stored_table(chain: Chain, weights: WeightMap) -> StoredTensor:
    """Return where the embedding of a chain that has rows is stored."""
    stored = _stored_table(weights, _name_of(chain))
    assert stored is not None, "it has rows"
    return stored


def embedding_bytes(chain: Chain) -> int:
    """Bytes of the embedding in the dtype of compute."""
    return int(chain.model.get_input_embeddings().weight.numel()) * chain.dtype.itemsize


def read_embedding_rows(chain: Chain, weights: WeightMap | None) -> StoredRows:
    """Read the rows of a chain's embedding as passes need them, from here on: unit 0 is without it. None: nothing is run.

    Return what reads them.
    """
    stored = None if weights is None else _stored_table(weights, _name_of(chain))

    def make(table: nn.Embedding, whole: UnitLayout, taking_back: Callable[[], None]) -> StoredRows:
        return StoredRows(table, None if stored is None else (stored,), chain.dtype, whole, taking_back)

    return put_rows(chain, make)


def put_rows(chain: Chain, make: Callable[[nn.Embedding, UnitLayout, Callable[[], None]], _Rows]) -> _Rows:
    """Put what `make` returns in the place of a chain's embedding, and return it. It is given the embedding, the layout of the
    unit with it, and what takes it back.
    """
    name, whole, table = _name_of(chain), chain.layouts[0], chain.model.get_input_embeddings()

    def taking_back() -> None:
        chain.model.set_input_embeddings(table)
        chain.lay_out((whole, *chain.layouts[1:]))

    rows = make(table, whole, taking_back)
    chain.model.set_input_embeddings(rows)
    chain.lay_out((without(whole, frozenset({name})), *chain.layouts[1:]))
    return rows


def take_back(chain: Chain) -> bool:
    """Return whether rows of a chain's embedding were read as passes need them: from here on the whole is in unit 0 again."""
    rows = chain.model.get_input_embeddings()
    if not isinstance(rows, StoredRows):
        return False
    rows.taking_back()
    return True


def with_table(chain: Chain) -> Chain:
    """Return the chain with the whole of unit 0: for the names of all parameters, not to be run."""
    rows = chain.model.get_input_embeddings()
    if not isinstance(rows, StoredRows):
        return chain
    found = copy(chain)
    found.layouts = (rows.whole, *chain.layouts[1:])
    return found


def _name_of(chain: Chain) -> str:
    weight = chain.model.get_input_embeddings().weight
    return next(str(name) for name, each in chain.model.named_parameters() if each is weight)


def _stored_table(weights: WeightMap, name: str) -> StoredTensor | None:
    """Return the stored tensor that a parameter is, row by row; None if it is coded, or made of others."""
    pieces = weights.pieces.get(name, ())
    if len(pieces) != 1 or pieces[0].index != ():
        return None
    stored = weights.checkpoint.tensors[pieces[0].key]
    return stored if stored.coded is None and stored.dtype in ROW_DTYPES and len(stored.shape) == 2 else None
