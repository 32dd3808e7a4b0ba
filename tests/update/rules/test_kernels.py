"""What the machine code must contain, and what not; and that it is of the sources that are there."""

import importlib
import sys

import numba
import numpy as np
import pytest
from update_planes import COMPUTE_DTYPES, STEP, adamw, gradient_of, ordinary

from headrace.machine.cpu import processor_flags
from headrace.update.rules.loops import plain_loop


def listing_of(compute_dtype):
    rule = adamw(compute_dtype)
    scalars = np.array(rule.scalars(STEP, 0.1, 1.0), np.float32)
    loop = plain_loop(type(rule).element, scalars.size)
    # Compiled afresh with the options of the package, because code from the cache on disk cannot be listed.
    options = {name: value for name, value in loop.targetoptions.items() if name != "nopython"}
    fresh = numba.njit(**options)(loop.py_func)
    weight, states = ordinary(64, 0, compute_dtype)
    bits = weight.view(np.uint16) if compute_dtype == "float16" else weight
    fresh(gradient_of(64, 0, "uint16"), scalars, bits, *states)
    (listing,) = fresh.inspect_asm().values()
    return listing


@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_machine_code_of_an_update(compute_dtype):
    listing = listing_of(compute_dtype)
    assert "sqrt" in listing
    # A contraction would round once where the reference rounds twice.
    assert not [name for name in ("fmadd", "fmsub", "fnmadd", "fmla", "fmls") if name in listing]
    if "avx2" in processor_flags():
        assert "sqrtps" in listing, "not vectorised"
        assert "prefetch" in listing


RULE = """
from headrace.update.rules.loops import inlined

@inlined
def step_of(gradient, rate):
    return {step}

@inlined
def element(p, gradient, states, scalars):
    return p - step_of(gradient, scalars[0]), states
"""


def test_machine_code_of_a_rule_whose_arithmetic_was_changed_is_not_used(tmp_path, monkeypatch):
    """The change is not in the function that the loop calls, but in what that one calls; the loop's own file is as it was."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)

    def updated(step):
        (tmp_path / "rule_of_a_test.py").write_text(RULE.format(step=step))
        monkeypatch.delitem(sys.modules, "rule_of_a_test", raising=False)
        importlib.invalidate_caches()
        loop = plain_loop(importlib.import_module("rule_of_a_test").element, 1)
        weight = np.full(8, 3.0, np.float32)
        loop(np.full(8, 2.0, np.float32), np.full(1, 0.5, np.float32), weight)
        return weight[0], loop.stats.cache_hits.total()

    assert updated("gradient * rate") == (2.0, 0)
    assert updated("gradient * rate") == (2.0, 1)
    assert updated("gradient / rate") == (-1.0, 0)
    assert updated("gradient * rate") == (2.0, 1)
