"""What the machine code must contain, and what not."""

import platform

import numba
import numpy as np
import pytest
from update_planes import HYPER, gradient_of, ordinary

from headrace.update import adamw_coefficients, kernels

LOOPS = [("bfloat16", kernels.adamw_bfloat16), ("float32", kernels.adamw_float32), ("float16", kernels.adamw_float16)]


def listing_of(compute_dtype, loop):
    # Compiled afresh with the options of the package, because code from the cache on disk cannot be listed.
    options = {name: value for name, value in loop.targetoptions.items() if name != "nopython"}
    fresh = numba.njit(**options)(loop.py_func)
    weight, states = ordinary(64, 0, compute_dtype)
    bits = weight.view(np.uint16) if compute_dtype == "float16" else weight
    fresh(bits, *states, gradient_of(64, 0, "uint16"), adamw_coefficients(HYPER, 0.1, 1.0).vector())
    (listing,) = fresh.inspect_asm().values()
    return listing


@pytest.mark.parametrize(("compute_dtype", "loop"), LOOPS)
def test_machine_code_of_an_update(compute_dtype, loop):
    listing = listing_of(compute_dtype, loop)
    assert "sqrt" in listing
    # A contraction would round once where the reference rounds twice.
    assert not [name for name in ("fmadd", "fmsub", "fnmadd", "fmla", "fmls") if name in listing]
    if platform.machine() == "x86_64":
        assert "sqrtps" in listing, "not vectorised"
        assert "prefetch" in listing
