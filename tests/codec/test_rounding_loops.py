"""The compiled loops of rounding against torch's operations on the same numbers, and scales against all that may be tried.

Run: pytest tests/codec/test_rounding_loops.py
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.codec import Grid, Int4Grid, TernaryGrid, gptq, nearest, row_pieces
from headrace.codec.grids import _SHRINKS

GRIDS: list[Any] = [Int4Grid(group=16), Int4Grid(group=32, stored=torch.float32), TernaryGrid()]


def drawn(seed: int, num: int, rows: int, columns: int, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights with zeros, whole steps, tiny and large numbers, and the Hessians of random inputs."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(num, rows, columns, generator=generator) * size
    kinds = torch.randint(0, 8, weights.shape, generator=generator)
    weights = torch.where(kinds == 0, 0.0, torch.where(kinds == 1, weights.mul(2).round() / 2, weights))
    weights[:, 0] = 0.0
    weights[:, 1] *= 1e-30
    inputs = torch.randn(num, 2 * columns, columns, generator=generator)
    return weights, inputs.mT @ inputs


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@given(st.integers(0, 1 << 30), st.sampled_from([1e-3, 1.0, 1e4]), st.sampled_from([1, 40, 64]))
@settings(max_examples=12, deadline=None)
def test_columns_have_the_bits_of_torchs_operations(grid: Grid, seed: int, size: float, block: int) -> None:
    weights, hessians = drawn(seed, 2, 9, 96, size)
    found = gptq(weights, hessians, grid, block_columns=block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(grid), "loop", None)
        expected = gptq(weights, hessians, grid, block_columns=block)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.sides, expected.sides)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@given(st.integers(0, 1 << 30), st.sampled_from([1e-38, 1e-3, 1e4]), st.sampled_from([17, 32, 64]))
@settings(max_examples=12, deadline=None)
def test_no_scale_that_may_be_tried_is_better(stored: torch.dtype, seed: int, size: float, columns: int) -> None:
    """Errors are compared in float64. Of two that are as good either may be taken; squares below 1e-44 vanish in float32."""
    weights, importance = drawn(seed, 1, 7, columns, size)[0][0], torch.rand(columns) + 0.1
    grid = Int4Grid(stored=stored)
    largest = weights.abs().amax(dim=-1, keepdim=True) / 7
    tried = torch.cat([grid._stored_scale(largest * shrink) for shrink in (1.0, *_SHRINKS)], dim=1)
    steps = (weights[:, None].double() / tried[..., None].double()).round().clamp(-8, 7)
    errors = ((steps * tried[..., None].double() - weights[:, None].double()) ** 2 * importance.double()).sum(dim=-1)
    found = grid.fit(weights, importance)
    places = (tried == found).double().argmax(dim=1)
    assert bool((tried == found).any(dim=1).all())
    assert bool((errors.gather(1, places[:, None])[:, 0] <= errors.amin(dim=1) * (1 + 1e-4) + columns * 1e-44).all())


def test_a_scale_of_other_dtypes_is_found_by_torch() -> None:
    """float16 has no loop; values are as they are stored there."""
    grid, weights = Int4Grid(group=32, stored=torch.float16), torch.randn(1, 5, 64)
    assert grid.loop is None
    assert torch.equal(nearest(weights, grid).values, nearest(weights, grid).values.half().float())


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_rows_on_several_cores_change_nothing(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, hessians = drawn(3, 2, 11, 96)
    expected = gptq(weights, hessians, grid), nearest(weights, grid)
    monkeypatch.setattr(row_pieces, "_LEAST_WEIGHTS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    found = gptq(weights, hessians, grid), nearest(weights, grid)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(one.sides, other.sides)
