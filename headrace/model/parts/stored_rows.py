"""What stands in the place of an embedding whose rows stay in the file: it reads those of the ids that it is called with.

Invariant: hidden states have the bits of the whole table: a row is copied, and rounded as the table would be.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from io import BufferedIOBase, RawIOBase
from itertools import accumulate
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from headrace.model.stored.safetensors_file import StoredTensor
from headrace.terms.embedding_rows import EmbeddingRows
from headrace.terms.errors import StorageError
from headrace.terms.layout import UnitLayout

ROW_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_READERS = 8
_RUNS_EACH = 16
# A run of neighbours: place of the first among the rows that are read, its part, its number there, how many.
_Run = tuple[int, int, int, int]


class RowReader:
    """Reads rows of a table whose `parts`, stored tensors of two dimensions and one dtype, lie one below the other.

    `bytes_read` counts them.
    """

    def __init__(self, *parts: StoredTensor) -> None:
        self._parts, self.bytes_read = parts, 0
        self._starts = [0, *accumulate(part.shape[0] for part in parts)]

    def read(self, wanted: list[int]) -> torch.Tensor:
        """Return these rows, which ascend, as they are stored; those that follow one another are read together.

        Raises:
            StorageError: a file is gone, or ends early.
        """
        dtype, width = ROW_DTYPES[self._parts[0].dtype], self._parts[0].shape[1]
        buffer = np.empty((len(wanted), width * dtype.itemsize), np.uint8)
        runs = [run for start, row, count in _runs(wanted) for run in self._within_parts(start, row, count)]
        with ExitStack() as opened:
            files = dict[str, int]()
            for part in {part for _, part, _, _ in runs}:
                path = self._parts[part].path
                if str(path) not in files:
                    files[str(path)] = opened.enter_context(_open(self._parts[part])).fileno()
            if len(runs) <= _RUNS_EACH:
                self._fill(files, buffer, runs)
            else:
                shares = [runs[at : at + _RUNS_EACH] for at in range(0, len(runs), _RUNS_EACH)]
                with ThreadPoolExecutor(_READERS) as readers:
                    list(readers.map(lambda share: self._fill(files, buffer, share), shares))
        self.bytes_read += buffer.nbytes
        return torch.from_numpy(buffer).view(dtype)

    def _within_parts(self, start: int, row: int, count: int) -> Iterator[_Run]:
        """Yield the runs of one part each that a run of rows is."""
        while count:
            part = bisect_right(self._starts, row) - 1
            here = min(count, self._starts[part + 1] - row)
            yield start, part, row - self._starts[part], here
            start, row, count = start + here, row + here, count - here

    def _fill(self, files: dict[str, int], buffer: np.ndarray, runs: Sequence[_Run]) -> None:
        size = buffer.shape[1]
        for at, number, row, count in runs:
            part = self._parts[number]
            into = memoryview(buffer[at : at + count].reshape(-1))  # type: ignore[arg-type]
            found = os.preadv(files[str(part.path)], [into], part.offset + row * size)
            if found != count * size:
                raise StorageError(f"{part.path}: row {row} of {part.key} ends early; fetch the file again")


class StoredRows(nn.Module):
    """Stands in the place of an embedding, without a parameter. `weight` has the table's shape, and no numbers.

    `whole` is the layout of the unit with the table, and `taking_back` puts the table in its place again. `stored` says where
    rows lie (see `RowReader`); None: nothing is run. `asked` counts the ids of calls that ask for shapes alone. Where rows are
    trained, it `learns`.
    """

    learns: ClassVar[bool] = False

    def __init__(
        self,
        table: nn.Embedding,
        stored: Sequence[StoredTensor] | None,
        dtype: torch.dtype,
        whole: UnitLayout,
        taking_back: Callable[[], None],
    ) -> None:
        super().__init__()
        self.taking_back, self.whole = taking_back, whole
        self._weight = table.weight.detach()  # on the meta device
        self._reader = RowReader(*stored) if stored is not None else None
        self._stored_dtype = ROW_DTYPES[stored[0].dtype] if stored else None
        self._dtype, self._is_wanted, self.asked = dtype, True, 0

    @property
    def weight(self) -> torch.Tensor:
        """A tensor of the table's shape, for code that asks for that, or for its dtype."""
        return self._weight

    @property
    def figures(self) -> EmbeddingRows:
        """What a plan knows of it."""
        return EmbeddingRows(
            rows=self.weight.shape[0],
            stored_bytes=self.weight.shape[1] * (self._stored_dtype or self._dtype).itemsize,
            computed_bytes=self.weight.shape[1] * self._dtype.itemsize,
            learns=self.learns,
        )

    @property
    def bytes_read(self) -> int:
        """Bytes that came from the file."""
        return self._reader.bytes_read if self._reader is not None else 0

    @contextmanager
    def unwanted(self) -> Iterator[None]:
        """Read nothing in this context, where what comes of the rows is dropped: they are zero."""
        self._is_wanted = False
        try:
            yield
        finally:
            self._is_wanted = True

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of `ids` (any shape), (..., width)."""
        shape = (*ids.shape, self.weight.shape[1])
        if not self._is_wanted:
            return ids.new_zeros(shape, dtype=self._dtype)
        if ids.is_meta or type(ids) is not torch.Tensor or not self._has_numbers:  # shapes alone are asked for
            self.asked += ids.numel()
            return ids.new_empty(shape, dtype=self._dtype, requires_grad=self.learns and torch.is_grad_enabled())
        wanted, places = torch.unique(ids.detach().cpu(), return_inverse=True)
        return self._looked_up(wanted, places.view(ids.shape), ids.device)

    @property
    def _has_numbers(self) -> bool:
        """Whether rows can be read."""
        return self._reader is not None

    def _looked_up(self, wanted: torch.Tensor, places: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return those of the rows `wanted` that `places` (any shape) name, on `device`."""
        assert self._reader is not None, "the caller looked"
        rows = self._reader.read(wanted.tolist()).to(self._dtype)
        return rows[places.view(-1)].view(*places.shape, -1).to(device)


def rows_within(block: nn.Module) -> list[StoredRows]:
    """Return what stands in the places of tables of a block."""
    return [module for module in block.modules() if isinstance(module, StoredRows)]


def _open(part: StoredTensor) -> BufferedIOBase | RawIOBase:
    try:
        return part.path.open("rb", buffering=0)
    except OSError as error:
        raise StorageError(f"{part.path}: cannot open the file: {error.strerror}") from error


def _runs(wanted: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield each run of neighbours in sorted rows: place of the first in the list, its number, how many."""
    start = 0
    for end in range(1, len(wanted) + 1):
        if end == len(wanted) or wanted[end] != wanted[end - 1] + 1:
            yield start, wanted[start], end - start
            start = end
