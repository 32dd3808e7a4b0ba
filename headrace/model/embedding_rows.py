"""An embedding whose rows stay in the file: a pass reads those of its tokens, and no others.

For models that do not fit in memory, whose embedding is frozen and is not the head as well. A row of 8 KiB is read in some
100 microseconds; kept whole, the table of a large vocabulary takes a gigabyte, which then every pass reads of the blocks.
Invariant: hidden states have the bits of the whole table: a row is copied, and rounded as the table would be.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import nn

from headrace.model.chain import Chain
from headrace.model.matching import WeightMap
from headrace.model.safetensors_file import StoredTensor
from headrace.model.stored_experts import without
from headrace.terms.errors import StorageError

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_READERS = 8
_RUNS_EACH = 16


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


def embedding_bytes(chain: Chain) -> int:
    """Bytes of the embedding in the dtype of compute."""
    return int(chain.model.get_input_embeddings().weight.numel()) * chain.dtype.itemsize


def read_rows(chain: Chain, weights: WeightMap | None) -> None:
    """Read the rows of a chain's embedding as passes need them, from here on: unit 0 is without it. None: nothing is run."""
    name, whole, table = _name_of(chain), chain.layouts[0], chain.model.get_input_embeddings()
    stored = None if weights is None else _stored_table(weights, name)

    def taking_back() -> None:
        chain.model.set_input_embeddings(table)
        chain.lay_out((whole, *chain.layouts[1:]))

    chain.model.set_input_embeddings(StoredRows(table, stored, chain.dtype, taking_back))
    chain.lay_out((without(whole, frozenset({name})), *chain.layouts[1:]))


def take_back(chain: Chain) -> bool:
    """Return whether rows of a chain's embedding were read as passes need them: from here on the whole is in unit 0 again."""
    rows = chain.model.get_input_embeddings()
    if not isinstance(rows, StoredRows):
        return False
    rows.taking_back()
    return True


def _name_of(chain: Chain) -> str:
    weight = chain.model.get_input_embeddings().weight
    return next(str(name) for name, each in chain.model.named_parameters() if each is weight)


def _stored_table(weights: WeightMap, name: str) -> StoredTensor | None:
    """Return the stored tensor that a parameter is, row by row; None if it is coded, or made of others."""
    pieces = weights.pieces.get(name, ())
    if len(pieces) != 1 or pieces[0].index != ():
        return None
    stored = weights.checkpoint.tensors[pieces[0].key]
    return stored if stored.coded is None and stored.dtype in _DTYPES and len(stored.shape) == 2 else None


class StoredRows(nn.Module):
    """Stands in the place of an embedding, without a parameter. `weight` has the table's shape, and no numbers."""

    def __init__(self, table: nn.Embedding, stored: StoredTensor | None, dtype: torch.dtype, back: Callable[[], None]) -> None:
        super().__init__()
        self.taking_back = back
        self.weight = table.weight.detach()  # on the meta device
        self._stored, self._dtype = stored, dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of `ids` (any shape), (..., width)."""
        if self._stored is None or ids.is_meta or type(ids) is not torch.Tensor:  # shapes alone are asked for
            return ids.new_empty((*ids.shape, self.weight.shape[1]), dtype=self._dtype)
        wanted, places = torch.unique(ids.detach().cpu(), return_inverse=True)
        rows = self._read(wanted.tolist()).to(self._dtype)
        return rows[places.view(-1)].view(*ids.shape, -1).to(ids.device)

    def _read(self, wanted: list[int]) -> torch.Tensor:
        """Return these rows, as they are stored; those that follow one another are read together."""
        assert self._stored is not None, "the caller looked"
        dtype, width = _DTYPES[self._stored.dtype], self._stored.shape[1]
        size = width * dtype.itemsize
        buffer = np.empty((len(wanted), size), np.uint8)
        runs = list(_runs(wanted))
        with self._stored.path.open("rb", buffering=0) as file:
            if len(runs) <= _RUNS_EACH:
                self._fill(file.fileno(), buffer, runs)
            else:
                parts = [runs[at : at + _RUNS_EACH] for at in range(0, len(runs), _RUNS_EACH)]
                with ThreadPoolExecutor(_READERS) as readers:
                    list(readers.map(lambda part: self._fill(file.fileno(), buffer, part), parts))
        return torch.from_numpy(buffer).view(dtype)

    def _fill(self, file: int, buffer: np.ndarray, runs: Sequence[tuple[int, int, int]]) -> None:
        assert self._stored is not None, "the caller looked"
        size = buffer.shape[1]
        for at, row, count in runs:
            into = memoryview(buffer[at : at + count].reshape(-1))  # type: ignore[arg-type]
            found = os.preadv(file, [into], self._stored.offset + row * size)
            if found != count * size:
                raise StorageError(f"{self._stored.path}: row {row} of {self._stored.key} ends early; fetch the file again")


def _runs(wanted: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield each run of neighbours in sorted rows: place of the first in the list, its number, how many."""
    start = 0
    for end in range(1, len(wanted) + 1):
        if end == len(wanted) or wanted[end] != wanted[end - 1] + 1:
            yield start, wanted[start], end - start
            start = end
