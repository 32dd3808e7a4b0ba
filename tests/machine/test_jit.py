"""Compiled loops can do without a cache on disk: a read-only installation without a home directory."""

import importlib.util
from types import ModuleType
from typing import Any

import numba
import numpy as np
import pytest

from headrace.machine import jit
from headrace.store.checksum import checksum


@pytest.fixture(autouse=True)
def nowhere_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba refuses `cache=True` where it finds no directory."""
    njit = numba.njit

    def refuse_cache(*functions: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(*functions, **options)

    monkeypatch.setattr(numba, "njit", refuse_cache)
    monkeypatch.setattr(jit, "njit", refuse_cache)


def loaded_again(name: str) -> ModuleType:
    """Return a second copy of a module, made now."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_loop_is_compiled_all_the_same() -> None:
    def double(values: Any) -> None:
        for i in range(values.size):
            values[i] *= 2

    values = np.ones(4, np.float32)
    jit.compiled(double)(values)
    assert values.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("name", ["headrace.store.checksum", "headrace.update.rules.kernels", "headrace.update.rules.loops"])
def test_what_has_loops_can_be_imported(name: str) -> None:
    assert loaded_again(name).__name__ == name


def test_the_checksum_is_the_same() -> None:
    data = np.arange(1000, dtype=np.uint64)
    assert loaded_again("headrace.store.checksum").checksum(data) == checksum(data)
