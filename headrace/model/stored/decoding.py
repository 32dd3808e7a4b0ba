"""Coded weights from a model's own files: the parts among the bytes read, and the slot that they are decoded into.

Invariant: a slot has the bits that the decoded model's files would give: weights are decoded in that dtype, then converted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from headrace.codec import Codec, Parts
from headrace.model.stored.coded_source import TORCH_NAMES, CodedSource
from headrace.terms.coding import as_matrix

# So many elements are decoded at once where the decoded dtype is not the one of compute.
_PIECE_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Bytes `[at, at + num_bytes)` of what was read are a tensor of this dtype and shape."""

    at: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def lies_odd(self) -> bool:
        """Whether it begins at no multiple of its numbers' size: files align tensors as they like."""
        return self.at % self.dtype.itemsize != 0

    def of(self, read: torch.Tensor) -> torch.Tensor:
        """Return the tensor: a view, or a copy where it is misaligned."""
        part = read[self.at : self.at + self.num_bytes]
        return (part.clone() if self.lies_odd else part).view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Decoding:
    """How a matrix of `rows` by `columns`, from element `start` of a unit's slot, is decoded from its `parts`.

    `dtype` is that of the decoded model. `given` are the parts that are no tensors in a file.
    """

    codec: Codec
    rows: int
    columns: int
    start: int
    dtype: torch.dtype
    parts: Mapping[str, PartPlace] = field(repr=False)
    given: Mapping[str, torch.Tensor] = field(repr=False)

    @classmethod
    def of(cls, source: CodedSource, places: Mapping[str, int], start: int) -> "Decoding":
        """Return how a weight is decoded whose parts lie at `places` (bytes, by key) in what is read."""
        parts = {
            name: PartPlace(places[stored.key], stored.num_bytes, _dtype(stored.dtype), stored.shape)
            for name, stored in source.stored.items()
        }
        rows, columns = as_matrix(source.shape)
        return cls(source.codec, rows, columns, start, _dtype(source.dtype), parts, source.given)

    def tensors(self, read: torch.Tensor) -> Parts:
        """Return the parts among the bytes `read` (uint8), and those that are given, on its device."""
        parts = {name: place.of(read) for name, place in self.parts.items()}
        return parts | {name: part.to(read.device) for name, part in self.given.items()}

    def put(self, read: torch.Tensor, into: torch.Tensor) -> None:
        """Fill the matrix's place in the flat slot `into` from the bytes `read` (uint8), on one device.

        Raises:
            ModelError: the parts are damaged.
        """
        parts = self.tensors(read)
        dense = into[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)
        if into.dtype == self.dtype:
            self.codec.decode(parts, dense, range(self.rows))
            return
        for rows in self._pieces():
            decoded = torch.empty((len(rows), self.columns), dtype=self.dtype, device=into.device)
            self.codec.decode(parts, decoded, rows)
            dense[rows.start : rows.stop].copy_(decoded)

    def making_bytes(self, dtype: torch.dtype, *, on_host: bool = True) -> int:
        """Return the most bytes that `put` allocates at once, for a slot of `dtype` on the host or on another device."""
        copied = sum(place.num_bytes for place in self.parts.values() if place.lies_odd)
        copied += sum(part.nbytes for part in self.given.values())
        # Two pieces, because the one before exists until the next has been made.
        decoded = 0 if dtype == self.dtype else 2 * len(next(self._pieces())) * self.columns * self.dtype.itemsize
        return self.codec.decoding_bytes(self.rows, self.columns, on_host=on_host) + copied + decoded

    def _pieces(self) -> Iterator[range]:
        step = max(1, _PIECE_ELEMENTS // self.columns)
        return (range(start, min(start + step, self.rows)) for start in range(0, self.rows, step))


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, TORCH_NAMES[name])
    return found
