"""The product of a sparse matrix in compressed rows (CSR) and a dense one: by a Triton kernel on GPUs where it works, by torch
elsewhere.

torch's sum over bags is such a product: a bag is a row, its weights are the non-zeros. On the host it is faster than torch's
own CSR product and than gathering rows one after the other, whose bits it has (docs/log/sparse-projectors).

Invariant: a row of the result is the sum of the row's non-zeros times rows of the dense matrix, in their order. No dense copy
of the sparse matrix is made, and nothing is added atomically.
"""

import functools
import importlib
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 256


class Csr(NamedTuple):
    """A sparse matrix: row i has `values[begins[i] : begins[i + 1]]` at `columns` of the same places.

    Types: `values` float32, `columns` int64, `begins` int64 (rows + 1,).
    """

    values: Tensor
    columns: Tensor
    begins: Tensor


def csr_times_dense(sparse: Csr, dense: Tensor) -> Tensor:
    """Return the product with `dense` (columns, width), float32."""
    kernels = triton_kernels(dense.device)
    if kernels is not None:
        return by_kernel(kernels, sparse, dense)
    values, columns, begins = sparse
    return F.embedding_bag(columns, dense.contiguous(), begins, mode="sum", per_sample_weights=values, include_last_offset=True)


def by_kernel(kernels: Any, sparse: Csr, dense: Tensor) -> Tensor:
    """Return the product with `dense`, by the kernel in `kernels`."""
    rows, width = len(sparse.begins) - 1, dense.shape[1]
    out = torch.empty(rows, width, device=dense.device, dtype=torch.float32)
    if out.numel():
        kernels.csr_times_dense[rows, -(-width // _BLOCK)](*sparse, dense.contiguous(), out, width, block=_BLOCK)
    return out


@functools.cache
def triton_kernels(device: torch.device) -> Any | None:
    """Return the module of kernels if Triton compiles for `device` and the result is right; None otherwise."""
    if device.type != "cuda":
        return None
    try:
        kernels = importlib.import_module("headrace.update.projectors.triton_kernels")
        whole = torch.arange(2, device=device)
        tried = Csr(torch.tensor([2.0], device=device, dtype=torch.float32), whole[1:], torch.tensor([0, 0, 1], device=device))
        found = by_kernel(kernels, tried, whole.float()[:, None])
        return kernels if found.tolist() == [[0.0], [2.0]] else None
    except Exception:  # whatever an incomplete compiler may raise
        return None
