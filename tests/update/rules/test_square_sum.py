"""The square sum is right, shows what is not finite, and does not depend on chunks or threads."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from update_planes import as_tensor, gradient_of

from headrace.terms.errors import ConfigError
from headrace.update import BLOCK_ELEMENTS, GRADIENT_DTYPES, add_block_sums, block_square_sums, square_sum
from headrace.update.rules.kernels import LANES


def values_of(gradient):
    """The numbers of a gradient as fp64."""
    return as_tensor(gradient, bfloat16=True).to(torch.float64).numpy()


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES)
@settings(max_examples=30, deadline=None)
@given(num_elements=st.integers(0, 3 * BLOCK_ELEMENTS + 7), seed=st.integers(0, 1000))
def test_close_to_the_exact_sum(dtype, num_elements, seed):
    gradient = gradient_of(num_elements, seed, dtype)
    exact = math.fsum(values_of(gradient) ** 2)
    assert square_sum(gradient) == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES)
def test_order_of_additions_is_the_documented_one(dtype):
    gradient = gradient_of(2 * BLOCK_ELEMENTS + 100, 1, dtype)
    squares = values_of(gradient) ** 2
    total = 0.0
    for start in range(0, squares.size, BLOCK_ELEMENTS):
        lanes = [0.0] * LANES
        for index, square in enumerate(squares[start : start + BLOCK_ELEMENTS]):
            lanes[index % LANES] += float(square)
        block = 0.0
        for lane in lanes:
            block += lane
        total += block
    assert square_sum(gradient) == total


@settings(max_examples=30, deadline=None)
@given(cuts=st.sets(st.integers(1, 39), max_size=8))
def test_chunks_do_not_change_a_bit(cuts):
    gradient = gradient_of(40 * BLOCK_ELEMENTS + 5, 2, "uint16")
    edges = [0, *(cut * BLOCK_ELEMENTS for cut in sorted(cuts)), gradient.size]
    carry = 0.0
    for start, stop in itertools.pairwise(edges):
        carry = square_sum(gradient[start:stop], carry)
    assert carry == square_sum(gradient)


def test_threads_do_not_change_a_bit():
    gradient = gradient_of(64 * BLOCK_ELEMENTS, 3, "float32")
    parts = np.split(gradient, 8)
    with ThreadPoolExecutor(4) as pool:
        sums = np.concatenate(list(pool.map(block_square_sums, parts)))
    assert add_block_sums(sums) == square_sum(gradient)


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES)
@pytest.mark.parametrize("index", [0, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS + 6])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_value_that_is_not_finite_shows(dtype, index, value):
    gradient = gradient_of(2 * BLOCK_ELEMENTS + 7, 4, dtype)
    assert math.isfinite(square_sum(gradient))
    number = np.array([value], np.float32)
    gradient[index] = (number.view(np.uint32) >> 16)[0] if dtype == "uint16" else number[0]
    total = square_sum(gradient)
    assert math.isnan(total) if math.isnan(value) else total == math.inf


def test_the_largest_numbers_do_not_overflow():
    gradient = np.full(1 << 16, np.finfo(np.float32).max, np.float32)
    assert square_sum(gradient) == pytest.approx(float(gradient[0]) ** 2 * gradient.size, rel=1e-14)


def test_every_float16_is_read_right():
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    numbers = bits[np.isfinite(bits)]
    for start in range(0, numbers.size, BLOCK_ELEMENTS):
        part = numbers[start : start + BLOCK_ELEMENTS]
        assert square_sum(part) == pytest.approx(math.fsum(part.astype(np.float64) ** 2), rel=1e-14)
    spread = np.zeros(numbers.size * BLOCK_ELEMENTS // 32, np.float16)
    spread[:: BLOCK_ELEMENTS // 32] = numbers
    assert np.isfinite(block_square_sums(spread)).all()


@pytest.mark.parametrize("gradient", [np.zeros(4, np.float64), np.zeros((2, 2), np.float32), np.zeros(8, np.float32)[::2]])
def test_arrays_that_do_not_fit_are_refused(gradient):
    with pytest.raises(ConfigError, match=r"one contiguous dimension .*found"):
        square_sum(gradient)
