"""Narrow products are those of float64 within the roundings of float32 sums, and have the same bits wherever they are computed.

Run: pytest tests/model/kernels/test_narrow.py
"""

import pytest
import torch
from torch.nn import functional

from headrace.machine import team
from headrace.model.kernels.narrow import NarrowProducts, is_narrow, multiplied
from headrace.model.kernels.products import WideProducts

SHAPES = ((1, 2), (7, 6), (2, 34), (65, 576), (576, 64), (4098, 130))


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32).bfloat16()


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize(("outputs", "length"), SHAPES)
@torch.no_grad()
def test_a_product_is_that_of_float64_within_roundings(rows: int, outputs: int, length: int) -> None:
    inputs, weights = numbers(rows, length), numbers(outputs, length)
    for bias in (None, numbers(outputs)):
        found = multiplied(inputs, weights, bias)
        exact, terms = (
            functional.linear(inputs.double(), weights.double()),
            functional.linear(inputs.double().abs(), weights.double().abs()),
        )
        if bias is not None:
            exact, terms = exact + bias.double(), terms + bias.double().abs()
        bound = 2**-8 * exact.abs() + (1 + 2**-8) * (length + 1) * 2**-24 * terms
        assert found.dtype == torch.bfloat16
        assert bool(((found.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("rows", [1, 4])
@torch.no_grad()
def test_every_number_of_bfloat16_is_multiplied_as_it_is(rows: int) -> None:
    """Denormal numbers, infinities and what is no number, at an even and at an odd place."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    weights = torch.stack([every, torch.zeros_like(every), torch.zeros_like(every), every], dim=1)
    for place in (0, 3):
        inputs = torch.zeros(rows, 4, dtype=torch.bfloat16)
        inputs[:, place] = 1
        weights[:, 3 - place] = 0
        found, exact = multiplied(inputs, weights), (every.float() + 0).bfloat16()
        for row in found:
            assert torch.equal(row.isnan(), exact.isnan())
            assert torch.equal(row.view(torch.int16)[~exact.isnan()], exact.view(torch.int16)[~exact.isnan()])
        weights[:, 3] = every


@torch.no_grad()
def test_sums_are_rounded_to_the_nearest_with_ties_to_even_and_beyond_the_largest_to_infinity() -> None:
    one, half = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16), 2.0**-8
    pairs = [[1.0, half], [1.0 + 2 * half, half], [1.0, 1.5 * half], [3.3895e38, 3.3895e38], [-3.3895e38, -3.3895e38]]
    found = multiplied(one, torch.tensor(pairs, dtype=torch.bfloat16))
    assert found.tolist() == [[1.0, 1.0 + 4 * half, 1.0 + 2 * half, float("inf"), float("-inf")]]


@torch.no_grad()
def test_bits_depend_neither_on_threads_nor_on_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, weights, before = numbers(4, 1026), numbers(515, 1026), torch.get_num_threads()
    memory = torch.empty(weights.numel() + 7, dtype=torch.bfloat16)
    for rows in (1, 2, 3, 4):
        expected = multiplied(inputs[:rows], weights)
        try:
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                for start in (0, 1, 3, 7):
                    elsewhere = memory[start : start + weights.numel()].view(weights.shape).copy_(weights)
                    assert torch.equal(multiplied(inputs[:rows], elsewhere), expected)
            monkeypatch.setattr(team, "torch_team", lambda: None)
            assert torch.equal(multiplied(inputs[:rows], weights), expected)
            monkeypatch.undo()
        finally:
            torch.set_num_threads(before)


def test_shape_dtype_and_place_alone_say_what_is_narrow() -> None:
    inputs, weights = numbers(4, 6), numbers(8, 6)
    with torch.no_grad():
        assert is_narrow(inputs, weights)
        assert is_narrow(inputs.view(2, 2, 6), weights, numbers(8))
        assert not is_narrow(numbers(5, 6), weights)
        assert is_narrow(numbers(1, 2048), numbers(2, 2048)), "a longer one is left to torch, if it is alone"
        assert is_narrow(numbers(2, 2050), numbers(2, 2050))
        assert not is_narrow(numbers(1, 2050), numbers(2, 2050))
        assert not is_narrow(inputs.float(), weights.float())
        assert not is_narrow(inputs, numbers(6, 8).T)
        assert not is_narrow(numbers(4, 5), numbers(8, 5))
        assert not is_narrow(inputs, weights, numbers(8).float())
        assert not is_narrow(inputs.to("meta"), weights.to("meta"))
    assert not is_narrow(inputs, weights), "gradients are computed"


@torch.no_grad()
def test_the_mode_computes_narrow_products_and_leaves_others_alone() -> None:
    inputs, wide, layer = numbers(3, 1, 64), numbers(5, 64), torch.nn.Linear(64, 48, dtype=torch.bfloat16)
    own = layer(wide)
    with NarrowProducts():
        assert torch.equal(layer(inputs), multiplied(inputs, layer.weight, layer.bias))
        assert torch.equal(layer(wide), own)


@torch.no_grad()
def test_other_products_are_wide_where_the_mode_says_so() -> None:
    """Also those within functions, and beside functions that go past the wide mode."""
    left, right = numbers(9, 64), numbers(9, 64)

    def products() -> list[torch.Tensor]:
        attended = torch.nn.functional.scaled_dot_product_attention(left[None, None], right[None, None], left[None, None])
        return [
            left @ right.T,
            functional.linear(left, right),
            torch.einsum("ij,kj->ik", left, right),
            attended,
            left.mul(right).to("cpu"),
        ]

    plain = products()
    with WideProducts():
        wide = products()
    for mode, expected in ((NarrowProducts(wide=True), wide), (NarrowProducts(), plain)):
        with mode:
            assert all(map(torch.equal, products(), expected))
            assert torch.equal(functional.linear(left[:2], right), multiplied(left[:2], right))
