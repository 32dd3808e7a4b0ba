"""How a unit whose weights are coded lies as bytes: for each matrix its code and where its parts are. Values only.

A code encodes matrices row by row. It turns a matrix into *parts* (codes, scales, row offsets), which are tensors of any size.
All parts of a unit lie back to back, each from a border of 64 bytes, on the drive as on the links. Compute reads none of them,
only the dense slot that is decoded from them. What no code takes (vectors, say) lies between them as compute reads it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from headrace.terms.layout import Plane
from headrace.terms.sizes import PAGE_BYTES, round_up

# Each part begins at a multiple of so many bytes: a cache line, which is enough for any dtype.
PART_ALIGNMENT = 64
# The name of the one part of a matrix that is not coded.
PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class CodePart:
    """One tensor of a coded matrix. `dtype` is torch's name of its dtype, `bytes_per_number` the size of one number."""

    name: str
    dtype: str
    bytes_per_number: int
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.bytes_per_number


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """`rows` by `columns` weights from element `offset` of the dense slot, and their parts, each with the byte where it begins.

    `codec` is the code's name, None where the one part is the weights as compute reads them.
    """

    offset: int
    rows: int
    columns: int
    codec: str | None
    parts: tuple[tuple[int, CodePart], ...]


@dataclass(frozen=True, slots=True)
class CodedUnit:
    """The matrices of a unit in the order of its slot, and the bytes of all their parts, in whole pages."""

    matrices: tuple[CodedMatrix, ...]
    num_bytes: int

    def plane(self, num_elements: int) -> Plane:
        """Return the unit's bytes as a plane that has a single number, as large as all these bytes, for all elements."""
        return Plane("coded", "uint8", self.num_bytes, num_elements)


# Weights by kind of code.
Decodes = tuple[tuple[str, int], ...]


def decodes_of(matrices: Iterable[tuple[str | None, int]]) -> Decodes:
    """Return the weights of `matrices` (name of the code, None for none; weights) by kind: the first word of its name."""
    found: dict[str, int] = {}
    for name, weights in matrices:
        if name is not None:
            kind = name.partition(":")[0].partition("-")[0]
            found[kind] = found.get(kind, 0) + weights
    return tuple(found.items())


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a parameter: a stack of matrices has the rows of all, a vector is one row."""
    return (prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def lay_out_parts(matrices: Iterable[tuple[int, int, int, str | None, Iterable[CodePart]]]) -> CodedUnit:
    """Return where the parts of `(offset, rows, columns, codec, parts)` lie, in that order."""
    start, placed = 0, []
    for offset, rows, columns, codec, parts in matrices:
        at = []
        for part in parts:
            at.append((start, part))
            start = round_up(start + part.num_bytes, PART_ALIGNMENT)
        placed.append(CodedMatrix(offset, rows, columns, codec, tuple(at)))
    return CodedUnit(tuple(placed), round_up(start, PAGE_BYTES))
