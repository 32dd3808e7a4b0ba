"""The product of a sparse matrix in compressed rows and a dense one on a GPU, in Triton. Only `sparse` imports this module."""

import triton
import triton.language as tl


@triton.jit
def csr_times_dense(values, columns, begins, dense, out, width, block: tl.constexpr):
    """Fill `block` columns of row `program` of `out` (rows, width), float32.

    `begins` int64 (rows + 1,) say where the non-zeros of each row begin in `values` float32 and `columns` int64. One program
    adds one row's in their order, and writes it once: no sums by atomic additions, so a repetition gives the same bits.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    at, end = tl.load(begins + row), tl.load(begins + row + 1)
    total = tl.zeros((block,), tl.float32)
    while at < end:
        source = dense + tl.load(columns + at) * width + column
        total += tl.load(values + at) * tl.load(source, mask=column < width, other=0.0)
        at += 1
    tl.store(out + row * width + column, total, mask=column < width)
