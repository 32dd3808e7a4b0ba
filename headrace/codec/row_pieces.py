"""What several codes share: decoding a few rows at a time, or on all cores, and refusing numbers that are not finite."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from headrace.terms.errors import ModelError

_Found = TypeVar("_Found")
_PIECE_ELEMENTS = 1 << 18
# A core gets at least so many weights: a thread takes a tenth of a millisecond to begin.
_LEAST_WEIGHTS = 1 << 20


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


def on_all_cores(work: Callable[[int, int], _Found], rows: int, columns: int) -> list[_Found]:
    """Return what `work` returns for ranges of rows, one for each core that torch uses; few weights are one range."""
    count = max(1, min(torch.get_num_threads(), rows, rows * columns // _LEAST_WEIGHTS))
    cuts = [rows * number // count for number in range(count + 1)]
    if count == 1:
        return [work(0, rows)]
    with ThreadPoolExecutor(count - 1) as others:
        rest = [others.submit(work, *cuts[number : number + 2]) for number in range(1, count)]
        return [work(*cuts[:2]), *(each.result() for each in rest)]


def refuse_no_numbers(weights: Tensor) -> None:
    """Refuse weights that cannot be coded.

    Raises:
        ModelError: one is NaN or infinite.
    """
    if not bool(torch.isfinite(weights).all()):
        raise ModelError("weights to be coded hold NaN or infinity")
