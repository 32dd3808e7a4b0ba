"""Grids: what may be rounded to what, with rows and groups that have nothing or little in them.

Run: pytest tests/codec/test_grids.py
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.codec import Int4Grid, TernaryGrid, nearest
from headrace.codec.int4 import pack, unpack
from headrace.codec.published import PackQuantized


def test_rows_without_one_sign_have_their_zeros_as_zeros() -> None:
    weights = torch.tensor([[[0.0, 1, 2, 0.2], [0, -1, -2, -0.2], [0, 0, 0, 0]]])
    found = nearest(weights, TernaryGrid())
    assert found.codes[0].tolist() == [[0, 0, 2, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert found.values[0].tolist() == [[0, 0, 2, 0], [0, 0, -2, 0], [0, 0, 0, 0]]


@given(st.integers(1, 3), st.integers(1, 3))
def test_words_are_unpacked_whatever_their_strides(rows: int, words: int) -> None:
    """A single row that was transposed is contiguous by torch's word, and cannot be viewed as bytes."""
    drawn = torch.randint(-(2**31), 2**31, (words, rows), generator=torch.Generator().manual_seed(7 * rows + words)).int()
    assert unpack(drawn.T, 8 * words).equal(unpack(drawn.T.clone(memory_format=torch.contiguous_format), 8 * words))


def test_share_of_zeros_of_normal_rows() -> None:
    """Figures for rows of these lengths, found by others with a program of their own."""
    generator = torch.Generator().manual_seed(0)
    for columns, expected in ((768, 0.882), (2080, 0.911), (6144, 0.936)):
        codes = nearest(torch.randn(1, 600, columns, generator=generator), TernaryGrid()).codes
        assert float((codes == 0).double().mean()) == pytest.approx(expected, abs=0.003)


@given(
    st.lists(st.floats(-4, 4, width=32), min_size=16, max_size=16),
    st.sampled_from([1.0, 1e-3, 1e-6, 1e-38, 0.0, 1e4]),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_no_weight_of_a_group_is_further_than_half_a_step_unless_it_is_clipped(
    values: list[float], size: float, stored: torch.dtype
) -> None:
    weights = torch.tensor(values).view(1, 1, 16) * size
    grid = Int4Grid(group=16, stored=stored)
    found = nearest(weights, grid)
    scale = found.sides[0, 0, 0, 0]
    assert bool(found.values.isfinite().all())
    inside = (weights / scale).abs() <= 7.5
    assert bool(((found.values - weights).abs() <= 0.52 * scale)[inside].all())
    widest = grid._stored_scale(weights.abs().amax(dim=-1, keepdim=True) / 7)
    plain = grid.values(grid.round(weights, widest), widest)
    assert (found.values - weights).square().sum() <= (plain - weights).square().sum() * (1 + 1e-2) + 1e-12


@given(st.integers(1, 5), st.integers(1, 41), st.integers(0, 2**31))
def test_codes_come_back_from_their_words(rows: int, columns: int, seed: int) -> None:
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    words = pack(codes)
    assert words.shape == (rows, -(-columns // 8))
    assert torch.equal(unpack(words, columns), codes)
    by_hand = [(int(words[row, column // 8]) >> 4 * (column % 8)) & 15 for row in range(rows) for column in range(columns)]
    assert by_hand == codes.flatten().tolist()


def test_what_is_stored_decodes_to_what_was_rounded_to() -> None:
    weights = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(1)) * 0.02
    found = nearest(weights, Int4Grid(group=32))
    scales = found.sides[0, :, :, 0].to(torch.bfloat16)
    into = torch.empty(12, 64, dtype=torch.bfloat16)
    PackQuantized(32, "bfloat16").decode({"weight_packed": pack(found.codes[0]), "weight_scale": scales}, into, range(12))
    assert torch.equal(into.float(), found.values[0])
