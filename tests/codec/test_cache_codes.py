"""Codes of keys and values: the loop against the definition, errors within half a step, each token by itself."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.codec.cache_codes import CACHE_CODES, CacheCode, GroupCode
from headrace.terms.options.generate_options import CACHE_DTYPES

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 9), st.sampled_from([1, 6, 16, 20, 64, 96]))


def test_options_name_all_codes() -> None:
    assert tuple(CACHE_CODES) == CACHE_DTYPES
    assert [code.bits for code in CACHE_CODES.values()] == [4.5, 8.5]
    assert [code.coded_bytes(256) for code in CACHE_CODES.values()] == [144, 272]


def numbers_of(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randn(shape[0], shape[1], 1, shape[3], generator=generator).exp()
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def encoded(code: CacheCode, numbers: torch.Tensor) -> torch.Tensor:
    rows, heads, tokens, width = numbers.shape
    into = torch.full((tokens, rows * code.coded_bytes(heads * width)), 255, dtype=torch.uint8)
    code.encode(numbers, into)
    return into


def decoded(code: CacheCode, numbers: torch.Tensor, coded: torch.Tensor) -> torch.Tensor:
    into = torch.full_like(numbers, math.nan, memory_format=torch.contiguous_format)
    code.decode(coded, into)
    return into


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(0, 1000), st.sampled_from(CACHE_DTYPES), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_loop_gives_what_the_definition_gives(shape: tuple[int, ...], seed: int, name: str, dtype: torch.dtype) -> None:
    code = CACHE_CODES[name]
    assert isinstance(code, GroupCode)
    numbers = numbers_of(shape, seed, dtype)
    coded, plainly = encoded(code, numbers), torch.full_like(numbers, math.nan)
    code.decode_plainly(coded, plainly)
    assert torch.equal(decoded(code, numbers, coded), plainly)


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.integers(0, 1000), st.sampled_from(CACHE_DTYPES))
def test_a_number_is_off_by_half_a_step(shape: tuple[int, ...], seed: int, name: str) -> None:
    code, numbers = CACHE_CODES[name], numbers_of(shape, seed, torch.float32)
    lines = numbers.transpose(1, 2).flatten(2)
    width = max(1.0, float(lines.abs().max()) if lines.numel() else 1.0)
    step = 2 * width / (2 ** int(name.removeprefix("int")) - 1)
    # Step and least value are rounded to 11 bits, and the largest code may then end below the largest number.
    room = step / 2 + 2 * width * 2**-10
    assert bool(((decoded(code, numbers, encoded(code, numbers)) - numbers).abs() <= room).all())


@pytest.mark.parametrize("name", CACHE_DTYPES)
def test_a_token_of_a_row_is_coded_by_itself(name: str) -> None:
    code, numbers = CACHE_CODES[name], numbers_of((3, 2, 7, 40), 0, torch.bfloat16)
    whole = encoded(code, numbers).view(7, 3, -1)
    for row in range(3):
        for token in range(7):
            alone = encoded(code, numbers[row : row + 1, :, token : token + 1])
            assert torch.equal(whole[token, row], alone[0])


@pytest.mark.parametrize("name", CACHE_DTYPES)
def test_equal_numbers_zeros_and_large_ones_come_back(name: str) -> None:
    code = CACHE_CODES[name]
    for value in (0.0, 1.5, -3.0, 60000.0):
        numbers = torch.full((1, 1, 2, 64), value)
        assert torch.equal(decoded(code, numbers, encoded(code, numbers)), numbers)


@pytest.mark.parametrize("name", CACHE_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_float16_cannot_hold_stays_finite_and_no_number_stays_none(name: str, dtype: torch.dtype) -> None:
    code, numbers = CACHE_CODES[name], torch.randn(1, 2, 3, 64).to(dtype)
    numbers[0, 0, 0, 0], numbers[0, 0, 1, 0] = 1e30, math.nan
    found = decoded(code, numbers, encoded(code, numbers))
    assert bool(found[0, 0, 1].isnan().all())
    found[0, 0, 1] = 0
    assert bool(found.isfinite().all())


def test_several_cores_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    code, numbers = CACHE_CODES["int4"], numbers_of((2, 2, 9, 64), 1, torch.bfloat16)
    coded = encoded(code, numbers)
    alone = decoded(code, numbers, coded)
    monkeypatch.setattr("headrace.codec.row_pieces._LEAST_WEIGHTS", 64)
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    assert torch.equal(decoded(code, numbers, coded), alone)
