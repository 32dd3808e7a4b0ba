"""What several codes share: decoding a few rows at a time, with little memory, and refusing numbers that are not finite."""

from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.terms.errors import ModelError

_PIECE_ELEMENTS = 1 << 18


def pieces(rows: range, columns: int) -> Iterator[tuple[slice, slice]]:
    """Yield, for pieces of `rows`, where they are in the matrix and where they go in what is decoded."""
    step = rows_of_a_piece(columns)
    for start in range(rows.start, rows.stop, step):
        stop = min(start + step, rows.stop)
        yield slice(start, stop), slice(start - rows.start, stop - rows.start)


def rows_of_a_piece(columns: int) -> int:
    """Return how many rows are decoded at a time."""
    return max(1, _PIECE_ELEMENTS // max(1, columns))


def piece_bytes(rows: int, columns: int, bytes_of_an_element: int) -> int:
    """Return the bytes of temporaries that take `bytes_of_an_element` for each element of a piece."""
    return min(rows, rows_of_a_piece(columns)) * columns * bytes_of_an_element + 4096


def refuse_no_numbers(weights: Tensor) -> None:
    """Refuse weights that cannot be coded.

    Raises:
        ModelError: one is NaN or infinite.
    """
    if not bool(torch.isfinite(weights).all()):
        raise ModelError("weights to be coded hold NaN or infinity")
