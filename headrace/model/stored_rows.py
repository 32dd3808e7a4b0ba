"""What stands in the place of an embedding whose rows stay in the file: it reads those of the tokens that it is called with.

Invariant: hidden states have the bits of the whole table: a row is copied, and rounded as the table would be.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from headrace.model.safetensors_file import StoredTensor
from headrace.terms.errors import StorageError
from headrace.terms.layout import UnitLayout

ROW_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_READERS = 8
_RUNS_EACH = 16


class RowReader:
    """Reads rows of a `stored` tensor of two dimensions; `bytes_read` counts them."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored, self.bytes_read = stored, 0

    def read(self, wanted: list[int]) -> torch.Tensor:
        """Return these rows, which ascend, as they are stored; those that follow one another are read together.

        Raises:
            StorageError: the file ends early.
        """
        dtype, width = ROW_DTYPES[self._stored.dtype], self._stored.shape[1]
        buffer = np.empty((len(wanted), width * dtype.itemsize), np.uint8)
        runs = list(_runs(wanted))
        with self._stored.path.open("rb", buffering=0) as file:
            if len(runs) <= _RUNS_EACH:
                self._fill(file.fileno(), buffer, runs)
            else:
                parts = [runs[at : at + _RUNS_EACH] for at in range(0, len(runs), _RUNS_EACH)]
                with ThreadPoolExecutor(_READERS) as readers:
                    list(readers.map(lambda part: self._fill(file.fileno(), buffer, part), parts))
        self.bytes_read += buffer.nbytes
        return torch.from_numpy(buffer).view(dtype)

    def _fill(self, file: int, buffer: np.ndarray, runs: Sequence[tuple[int, int, int]]) -> None:
        size = buffer.shape[1]
        for at, row, count in runs:
            into = memoryview(buffer[at : at + count].reshape(-1))  # type: ignore[arg-type]
            found = os.preadv(file, [into], self._stored.offset + row * size)
            if found != count * size:
                raise StorageError(f"{self._stored.path}: row {row} of {self._stored.key} ends early; fetch the file again")


class StoredRows(nn.Module):
    """Stands in the place of an embedding, without a parameter. `weight` has the table's shape, and no numbers.

    `whole` is the layout of the unit with the table, and `taking_back` puts the table in its place again. `stored` says where
    rows lie; None: nothing is run.
    """

    def __init__(
        self,
        table: nn.Embedding,
        stored: StoredTensor | None,
        dtype: torch.dtype,
        whole: UnitLayout,
        taking_back: Callable[[], None],
    ) -> None:
        super().__init__()
        self.taking_back, self.whole = taking_back, whole
        self.weight = table.weight.detach()  # on the meta device
        self._reader = RowReader(stored) if stored is not None else None
        self._dtype, self._is_wanted = dtype, True

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
            return ids.new_empty(shape, dtype=self._dtype)
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


def _runs(wanted: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield each run of neighbours in sorted rows: place of the first in the list, its number, how many."""
    start = 0
    for end in range(1, len(wanted) + 1):
        if end == len(wanted) or wanted[end] != wanted[end - 1] + 1:
            yield start, wanted[start], end - start
            start = end
