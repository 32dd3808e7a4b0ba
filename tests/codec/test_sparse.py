"""`sparse50`: what a bitmap leaves comes back, any rows by themselves; half of the weights go, by SparseGPT's choice.

Run: pytest tests/codec/test_sparse.py
"""

import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from headrace.codec import Parts, gptq, nearest, product_errors
from headrace.codec.grids import PrunedGrid
from headrace.codec.sparse import Sparse, in_torch
from headrace.codec.table import CODES
from headrace.codec.targets import SparseTarget
from headrace.terms.errors import ModelError
from headrace.testing.codec_contract import CodecContract

CODEC = Sparse()


def by_hand(parts: Parts, rows: int, columns: int) -> NDArray[np.float64]:
    out, numbers = np.zeros((rows, columns)), parts["values"].double().tolist()
    bitmap, offsets = parts["bitmap"].tolist(), parts["offsets"].tolist()
    for row in range(rows):
        at = offsets[row]
        for column in range(columns):
            if bitmap[row][column // 8] >> column % 8 & 1:
                out[row, column], at = numbers[at], at + 1
        assert at == offsets[row + 1]
    return out


class TestSparse(CodecContract):
    codec = CODEC
    shapes = ((1, 256), (3, 2), (17, 129), (40, 256), (2, 4097))
    error = 0.0

    def weights(self, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
        """Half of them zero."""
        weights = super().weights(rows, columns, seed)
        return torch.where(weights.abs() < weights.abs().median(), torch.zeros_like(weights), weights)

    def reference(self, parts: Parts, rows: int, columns: int) -> NDArray[np.float64]:
        return by_hand(parts, rows, columns)

    def damaged(self, parts: Parts) -> Iterator[Parts]:
        """Offsets that go back, beyond or elsewhere; a bit more or less; a bitmap of another size."""
        for place, value in ((0, -1), (1, 1 << 30), (-1, int(parts["offsets"][-1]) + 1), (0, 1)):
            wrong = parts["offsets"].clone()
            wrong[place] = value
            yield {**parts, "offsets": wrong}
        flipped = parts["bitmap"].clone()
        flipped[0, 0] ^= 1
        yield {**parts, "bitmap": flipped}
        yield {**parts, "bitmap": parts["bitmap"][:, :-1]}


@given(arrays(np.uint16, st.tuples(st.integers(1, 5), st.integers(2, 40)), elements=st.integers(0, 0xFFFF)))
def test_every_number_comes_back_bit_for_bit(bits: NDArray[np.uint16]) -> None:
    bits = np.where(bits & 0x7F80 == 0x7F80, bits & 0x807F, bits)  # finite
    weights = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    parts = CODEC.encode(weights)
    assert len(parts["values"]) - 8 == np.count_nonzero(bits), "minus zero is a number"
    into, there = torch.full_like(weights, 7.0), torch.full_like(weights, 7.0)
    CODEC.decode(parts, into, range(len(bits)))
    assert torch.equal(into.view(torch.int16), weights.view(torch.int16))
    assert in_torch(parts, there, range(len(bits))) is None
    assert torch.equal(there.view(torch.int16), weights.view(torch.int16))


@given(st.data())
def test_damage_is_refused_alike_on_host_and_device(data: st.DataObject) -> None:
    rows, columns = 4, data.draw(st.integers(2, 20))
    weights = torch.where(torch.rand(rows, columns) < 0.5, 0.0, torch.randn(rows, columns)).bfloat16()
    parts = {name: part.clone() for name, part in CODEC.encode(weights).items()}
    name = data.draw(st.sampled_from(["offsets", "bitmap"]))
    flat = parts[name].view(-1)
    place = data.draw(st.integers(0, len(flat) - 1))
    flat[place] = data.draw(st.integers(0, 255)) if name == "bitmap" else data.draw(st.integers(-5, rows * columns + 5))
    into, there = torch.zeros_like(weights), torch.zeros_like(weights)
    found = in_torch(parts, there, range(rows))
    try:
        CODEC.decode(parts, into, range(rows))
        assert found is None
        assert torch.equal(into, there)
    except ModelError as error:
        said = re.match(r"sparse: row (\d+) of 4 is damaged: ", str(error))
        assert said is not None
        assert found == int(said[1])


def test_the_size_that_endor_says() -> None:
    """OPT-66B's feed-forward matrix (Joo et al. 2024): 382.2 MB, and the sums of rows."""
    assert CODES["sparse50"].matrix_bytes(9216, 36864) - 4 * 9216 == 382_205_952


def test_half_of_the_weights_go_and_products_change_less_than_by_magnitude() -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(2, 64, 256, generator=generator) * 0.05
    inputs = torch.randn(2, 1024, 256, generator=generator) @ torch.randn(256, 256, generator=generator)
    hessians, grid = inputs.mT @ inputs, PrunedGrid()
    found, magnitude = gptq(weights, hessians, grid), nearest(weights, grid)
    for each in (found, magnitude):
        assert int((each.values == 0).sum()) == weights.numel() // 2
    error, plain = product_errors(weights, hessians, found.values, magnitude.values)
    assert bool((error < 0.7 * plain).all())


@pytest.mark.parametrize(("columns", "group"), [(256, 128), (576, 64), (40, 8), (7, None)])
def test_a_group_divides_the_width(columns: int, group: int | None) -> None:
    grid = SparseTarget().grid(columns, torch.bfloat16)
    assert grid is not None
    assert grid.group == group
    weights = torch.randn(1, 9, columns).bfloat16().float()
    rounded = gptq(weights, torch.eye(columns)[None], grid)
    parts = SparseTarget().parts(rounded.codes[0], rounded.sides[0], torch.bfloat16)
    into = torch.empty(9, columns)
    Sparse(len(parts["weight_values"]) - 8).decode(
        {name: parts[f"weight_{name}"] for name in ("bitmap", "offsets", "values")}, into, range(9)
    )
    assert torch.equal(into, rounded.values[0])
    assert parts["weight_shape"].tolist() == [9, columns]
