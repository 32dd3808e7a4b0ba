"""Up to four rows of bfloat16 times a matrix: our loop for narrow products beside torch's `linear`, on one thread and on all.

    python bench/narrow_rows.py [--seconds 60] [--shapes 2048x2048 8192x2048 2048x8192]

Matrices (outputs x inputs) are many and take turns, so that caches hold none of them; the two products take turns, too. Printed
are gigabytes of weights a second (the median of the rounds), and the median of how many times as fast ours is. One thread is
measured by its own seconds of the processor, so that other work disturbs less; all of them by the clock.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch.nn.functional import linear

from headrace.model.kernels.narrow import NARROW_ROWS, multiplied

SHAPES = ("576x576", "1536x576", "2048x2048", "8192x2048", "2048x8192")
# Together more than the last cache of most processors.
ALL_BYTES = 192 << 20


def seconds_of(product: Callable[..., torch.Tensor], row: torch.Tensor, matrices: list[torch.Tensor]) -> float:
    """Return the seconds of a product, by one round over the matrices."""
    clock = time.perf_counter if torch.get_num_threads() > 1 else time.thread_time
    start = clock()
    for matrix in matrices:
        product(row, matrix)
    return (clock() - start) / len(matrices)


def measure(shape: tuple[int, int], rows: int, seconds: float) -> tuple[float, float, float]:
    """Return gigabytes a second of ours and of torch's product, and the median of their ratios."""
    outputs, inputs = shape
    first = torch.randn(outputs, inputs, dtype=torch.float32).bfloat16()
    matrices = [first.clone() for _ in range(max(1, ALL_BYTES // first.nbytes))]
    row = torch.randn(rows, inputs, dtype=torch.float32).bfloat16()
    multiplied(row, first)
    found, end = list[tuple[float, float]](), time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < end:
        found.append((seconds_of(multiplied, row, matrices), seconds_of(linear, row, matrices)))
    ours, theirs = (first.nbytes / median(each) / 1e9 for each in zip(*found, strict=True))
    return ours, theirs, median(other / own for own, other in found)


def main() -> None:
    """Print a line for each shape, number of rows and number of threads."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=60)
    arguments.add_argument("--shapes", nargs="+", default=SHAPES)
    arguments.add_argument("--threads", type=int, nargs="+", default=sorted({1, torch.get_num_threads()}))
    given = arguments.parse_args()
    share = given.seconds / (len(given.threads) * len(given.shapes) * NARROW_ROWS)
    with torch.no_grad():
        for threads in given.threads:
            torch.set_num_threads(threads)
            for words in given.shapes:
                outputs, inputs = map(int, words.split("x"))
                for rows in range(1, NARROW_ROWS + 1):
                    ours, theirs, times = measure((outputs, inputs), rows, share)
                    print(
                        f"{threads} threads, {words}, {rows} rows: {ours:.1f} GB/s, torch {theirs:.1f}, {times:.2f} times",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
