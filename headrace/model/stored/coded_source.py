"""A weight whose parts are stored tensors: what readers of coded models find (`coded.py`)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headrace.codec import Codec, Parts
from headrace.model.stored.safetensors_file import StoredTensor, read_bytes
from headrace.terms.coding import as_matrix

TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "U16": "uint16",
}

Tensors = Mapping[str, StoredTensor]


class Refusal(Exception):
    """Why a code is not read."""


@dataclass(frozen=True)
class CodedSource:
    """Where the parts of a weight lie: `stored` parts by name; `given` parts have no tensor of their own in a file."""

    codec: Codec
    shape: tuple[int, ...]
    dtype: str
    stored: Mapping[str, StoredTensor] = field(repr=False)
    given: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)

    def parts(self) -> Parts:
        """Read all parts."""
        return {name: read_tensor(stored) for name, stored in self.stored.items()} | dict(self.given)

    def read_rows(self, piece_bytes: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Decode rows, and yield them as `safetensors_file.read_rows` does.

        Raises:
            ModelError: the parts are damaged.
        """
        parts, dtype = self.parts(), getattr(torch, TORCH_NAMES[self.dtype])
        rows, columns = as_matrix(self.shape)
        each = rows // self.shape[0]  # rows of the matrix for one entry of the first dimension
        step = max(1, min(self.shape[0], piece_bytes // max(1, each * columns * dtype.itemsize)))
        for start in range(0, self.shape[0], step):
            stop = min(start + step, self.shape[0])
            into = torch.empty((stop - start) * each, columns, dtype=dtype)
            self.codec.decode(parts, into, range(start * each, stop * each))
            bits = into.view(torch.int16).numpy().view(np.uint16) if self.dtype == "BF16" else into.numpy()
            yield start, stop, bits.reshape(stop - start, *self.shape[1:])


def read_tensor(stored: StoredTensor) -> torch.Tensor:
    """Return a whole tensor of any dtype."""
    out = np.empty(stored.num_bytes, np.uint8)
    start = 0
    for piece in read_bytes(stored):
        out[start : start + piece.size] = piece
        start += piece.size
    return torch.from_numpy(out).view(getattr(torch, TORCH_NAMES[stored.dtype])).view(stored.shape)


Found = tuple[dict[str, CodedSource], set[str]]  # coded weights by their names, and the names of their parts
Reader = Callable[[Mapping[str, Any], Tensors, str], Found]
