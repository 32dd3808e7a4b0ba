"""What a code for frozen weights is. It turns a matrix into parts, which lie on drives and cross links, and decodes them for
compute.

A code works row by row: any range of rows is decoded by itself. So several cores share a matrix, and an expert needs no other.
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from headrace.terms.coding import CodePart

Parts = Mapping[str, Tensor]


class Codec(Protocol):
    """A code for matrices of frozen weights. `headrace.testing.codec_contract` tests that each does what is said here."""

    @property
    def name(self) -> str:
        """The code's name in a run's record. A run keeps the code of its state."""

    @property
    def digest(self) -> str | None:
        """SHA-256 of the tables that decoding needs besides the parts (hexadecimal); None where it needs none."""

    def takes(self, rows: int, columns: int) -> bool:
        """Return whether it codes matrices of this shape; others lie as compute reads them."""

    def places(self, rows: int, columns: int) -> tuple[CodePart, ...]:
        """Return the parts of such a matrix at their largest: what encoding any weights may need."""

    def encode(self, weights: Tensor) -> Parts:
        """Return the parts of `weights` (rows, columns), of a floating dtype, on the host: each number is rounded to the
        nearest that the code has. If the code is `idempotent`, weights that it decoded before come out again, bit for bit.

        Raises:
            ModelError: a weight is no finite number, and the code is not `lossless`.
        """

    @property
    def lossless(self) -> bool:
        """Whether weights in bfloat16 come back bit for bit, whatever they are: NaN with its payload, too."""

    @property
    def idempotent(self) -> bool:
        """Whether encoding what was decoded changes nothing."""

    def decode(self, parts: Parts, into: Tensor, rows: range) -> None:
        """Fill `into` (len(rows), columns), contiguous, of a floating dtype, with these rows. All tensors are on one device.

        Nothing else is written to. The bits are the same for any cut into ranges, and on any device.

        Raises:
            ModelError: the parts are damaged: they do not make these rows.
        """

    def decoding_bytes(self, rows: int, columns: int, *, on_host: bool = True) -> int:
        """Return the most bytes that `decode` allocates at once for a whole matrix, on the host or on another device."""
