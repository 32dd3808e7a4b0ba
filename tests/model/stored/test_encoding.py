"""Splitting and joining of weights: exact for every finite bit pattern."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from headrace.model.stored.encoding import float32_of, put, take
from headrace.terms.errors import ModelError

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**127), max_value=2.0**127)


@given(arrays(np.float32, st.integers(1, 40), elements=FINITE))
def test_split_master_is_exact(values: np.ndarray) -> None:
    hi, lo = np.empty(values.shape, np.uint16), np.empty(values.shape, np.int16)
    put(values, "F32", hi, lo)
    joined = ((hi.astype(np.int64) << 16) + lo).astype(np.uint32).view(np.float32)
    assert np.array_equal(joined.view(np.uint32), values.view(np.uint32))
    assert np.array_equal(take(hi, lo, "F32").view(np.uint32), values.view(np.uint32))


@given(arrays(np.float32, st.integers(1, 40), elements=FINITE))
def test_hi_is_the_nearest_bfloat16(values: np.ndarray) -> None:
    hi, lo = np.empty(values.shape, np.uint16), np.empty(values.shape, np.int16)
    put(values, "F32", hi, lo)
    error = np.abs(float32_of(hi, "BF16").astype(np.float64) - values)
    even = torch.from_numpy(values).bfloat16().double().numpy()
    assert np.all(error <= np.abs(even - values))


def test_halves_round_away_from_zero() -> None:
    values = np.array([0x3F808000, 0xBF808000, 0x3F818000], np.uint32).view(np.float32)
    hi, lo = np.empty(3, np.uint16), np.empty(3, np.int16)
    put(values, "F32", hi, lo)
    assert hi.tolist() == [0x3F81, 0xBF81, 0x3F82]
    assert lo.tolist() == [-32768] * 3


@given(arrays(np.uint16, st.integers(1, 40)))
def test_bfloat16_is_copied(bits: np.ndarray) -> None:
    bits = np.where((bits & 0x7F80) == 0x7F80, 0, bits).astype(np.uint16)
    hi, lo = np.empty(bits.shape, np.uint16), np.ones(bits.shape, np.int16)
    put(bits, "BF16", hi, lo)
    assert np.array_equal(hi, bits)
    assert not lo.any()
    assert np.array_equal(take(hi, lo, "BF16"), bits)


@given(arrays(np.float32, st.integers(1, 40), elements=FINITE))
def test_rounding_to_bfloat16_is_that_of_torch(values: np.ndarray) -> None:
    bits = take(values, None, "BF16")
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(bits, expected)


@given(arrays(np.float16, st.integers(1, 40), elements=st.floats(width=16, allow_nan=False, allow_infinity=False)))
def test_float16_comes_back(values: np.ndarray) -> None:
    hi, lo = np.empty(values.shape, np.uint16), np.empty(values.shape, np.int16)
    put(values, "F16", hi, lo)
    assert np.array_equal(take(hi, lo, "F16").view(np.uint16), values.view(np.uint16))


def test_ranges() -> None:
    big = np.array([1.0, 70000.0], np.float32)
    with pytest.raises(ModelError, match="1 of 2"):
        put(big, "F32", np.empty(2, np.float16), np.empty(2, np.float32))
    with pytest.raises(ModelError, match="range of float16"):
        take(big, None, "F16")
    huge = np.array([np.finfo(np.float32).max], np.float32)
    with pytest.raises(ModelError, match="range of bfloat16"):
        put(huge, "F32", np.empty(1, np.uint16), np.empty(1, np.int16))
