"""What projectors promise, whichever chooses them: facts of algebra, and how good the ones that are fitted are."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.terms.layout import lay_out
from headrace.update.projectors import PROJECTORS, Pair, relative_error
from headrace.update.projectors.projector import Scattered, Sides, both, distinct_positions, random_signs
from headrace.update.wires.subspace import Subspace, subspaces

KINDS = sorted(PROJECTORS)
SHAPES = st.tuples(st.integers(1, 3), st.integers(9, 40), st.integers(9, 40))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed))


def fitted(kind: str, gradient: Tensor, dimension: int, nonzeros: int, seed: int = 0) -> Pair:
    """Return projectors of both sides, as far as they are larger than `dimension`."""
    chosen = PROJECTORS[kind]
    sides = Sides(*(chosen.dimension(side, dimension) for side in gradient.shape[1:]))
    found = chosen.fit(gradient, sides, nonzeros, generator(seed))
    given = [None if side is None else (*side, of) for side, of in zip(found, sides, strict=True)]
    return both(Sides(*given), lambda side: chosen.projector(*side))  # type: ignore[misc]


def dense(pair: Pair, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return P and Q of a stack as whole matrices, by what they do to unit vectors."""
    stack, rows, columns = shape
    return tuple(  # type: ignore[return-value]
        side.reduce(torch.eye(size).expand(stack, size, size)).transpose(1, 2)
        for side, size in ((pair.left, rows), (pair.right, columns))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_has_r_distinct_numbers_and_storage_does_not_depend_on_d(kind: str) -> None:
    layout = lay_out("block", [("up.weight", (60, 40), (1.0, 0.0)), ("norm.weight", (40,), (1.0, 0.0))])
    sizes = set()
    for dimension in (16, 32):
        (found,) = subspaces(layout, dimension, 4, PROJECTORS[kind])
        sizes.add(sum(found.numbers(PROJECTORS[kind]).values()))
        basis = torch.zeros(1024)
        found.fit(PROJECTORS[kind], drawn((1, 60, 40)), basis, generator())
        for projector in dense(found.pair(PROJECTORS[kind], basis), (1, 60, 40)):
            assert ((projector[0] != 0).sum(dim=1) == 4).all()
    assert sizes == {(60 + 40) * 4 * (1 if kind == "block" else 2)}


@given(SHAPES, st.sampled_from(KINDS), st.integers(0, 9))
@settings(max_examples=12)
def test_products_are_those_of_whole_matrices_and_factors_give_what_the_gradient_gives(
    shape: tuple[int, int, int], kind: str, seed: int
) -> None:
    gradient = drawn(shape, seed)
    pair = fitted(kind, gradient, 8, 2, seed)
    left, right = dense(pair, shape)
    core = pair.compress(gradient)
    torch.testing.assert_close(core, left.transpose(1, 2) @ gradient @ right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pair.decompress(core), left @ core @ right.transpose(1, 2), rtol=1e-4, atol=1e-4)
    # Of one product's factors, and as adjoints.
    outputs, inputs = drawn((1, shape[1], 5), seed + 1), drawn((1, shape[2], 5), seed + 2)
    one = Pair(*both(Sides(None, None), lambda side: side)) if shape[0] > 1 else pair
    whole = one.compress(outputs @ inputs.transpose(1, 2))
    torch.testing.assert_close(one.compress_factors(outputs, inputs), whole, rtol=1e-3, atol=1e-3)
    some = drawn(tuple(core.shape), seed + 3)
    assert float((core * some).sum()) == pytest.approx(float((gradient * pair.decompress(some)).sum()), rel=1e-2, abs=1e-2)


@given(SHAPES, st.sampled_from([7, 64]), st.integers(1, 5), st.integers(0, 9))
@settings(max_examples=12)
def test_sparse_products_are_those_of_a_dense_projector_in_float64(
    shape: tuple[int, int, int], dimension: int, nonzeros: int, seed: int
) -> None:
    """Of each matrix of a stack, in the same bits when repeated; a column without a number gives zeros."""
    stack, rows, width = shape
    positions = distinct_positions(stack, rows, dimension, nonzeros, generator(seed))
    values, above, below = (
        drawn((stack, rows, nonzeros), seed),
        drawn(shape, seed + 1),
        drawn((stack, dimension, width), seed + 2),
    )
    projector = Scattered(values, positions, dimension)
    whole = torch.zeros(stack, rows, dimension, dtype=torch.float64).scatter(2, positions, values.double())
    reduced, expanded = projector.reduce(above), projector.expand(below)
    torch.testing.assert_close(reduced.double(), whole.transpose(1, 2) @ above.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(expanded.double(), whole @ below.double(), rtol=1e-5, atol=1e-5)
    assert (reduced[(whole == 0).all(dim=1)] == 0).all()
    assert reduced.equal(projector.reduce(above))
    turned = projector.reduce(above.transpose(1, 2).contiguous().transpose(1, 2))
    assert turned.equal(reduced), "strides make no difference"


def test_signed_permutations_give_a_gradient_back_bit_for_bit() -> None:
    gradient, source = drawn((2, 12, 9), 1), generator(2)
    sides = []
    for size in gradient.shape[1:]:
        places = torch.stack([torch.randperm(size, generator=source) for _ in range(2)])[:, :, None]
        sides.append(Scattered(random_signs(places.shape, source), places, size))
    pair = Pair(*sides)
    assert pair.decompress(pair.compress(gradient)).equal(gradient)


@given(SHAPES, st.sampled_from(KINDS), st.floats(-2, 2), st.floats(-2, 2))
@settings(max_examples=12)
def test_compression_is_linear(shape: tuple[int, int, int], kind: str, a: float, b: float) -> None:
    one, other = drawn(shape, 1), drawn(shape, 2)
    pair = fitted(kind, one, 8, 2)
    torch.testing.assert_close(
        pair.compress(a * one + b * other), a * pair.compress(one) + b * pair.compress(other), rtol=1e-3, atol=1e-3
    )


@given(SHAPES, st.sampled_from([1, 2, 4]), st.integers(0, 9))
@settings(max_examples=16)
def test_blocks_have_orthonormal_columns_so_that_what_is_kept_is_kept_once(
    shape: tuple[int, int, int], nonzeros: int, seed: int
) -> None:
    """Also of a gradient of less rank than a group has rows, or of zero, and of groups of unequal length."""
    for gradient in (
        drawn(shape, seed),
        drawn((*shape[:2], 1), seed) @ drawn((shape[0], 1, shape[2]), seed),
        torch.zeros(shape),
    ):
        pair = fitted("block", gradient, 8, nonzeros)
        for projector in dense(pair, shape):
            gram = projector.transpose(1, 2) @ projector
            torch.testing.assert_close(gram, torch.eye(gram.shape[1]).expand_as(gram), rtol=1e-4, atol=1e-4)
        other = drawn(shape, seed + 1)
        estimate = pair.decompress(pair.compress(other))
        assert float(estimate.norm()) <= float(other.norm()) * 1.0001
        torch.testing.assert_close(pair.decompress(pair.compress(estimate)), estimate, rtol=1e-3, atol=1e-4)


def test_random_signs_are_right_on_average_and_as_noisy_as_they_must_be() -> None:
    """Mean squared relative error `(1 + (m-1)/d) (1 + (n-1)/d) - 1`; Gaussian values of few numbers are worse."""
    rows = columns = 64
    dimension, gradient = 32, drawn((1, 64, 64), 5)
    signs, gauss, mean = [], [], torch.zeros_like(gradient)
    for seed in range(60):
        source = generator(seed)
        for errors, values_of in ((signs, random_signs), (gauss, _gaussian)):
            pair = Pair(*(_scattered(values_of, size, dimension, source) for size in (rows, columns)))
            errors.append(float(relative_error(pair, gradient)) ** 2)
            if errors is signs:
                mean += pair.decompress(pair.compress(gradient)) / 60
                left, _ = dense(pair, (1, rows, columns))
                torch.testing.assert_close((left @ left.transpose(1, 2)).diagonal(dim1=1, dim2=2), torch.ones(1, rows))
    expected = (1 + 63 / 32) * (1 + 63 / 32) - 1
    assert sum(signs) / 60 == pytest.approx(expected, rel=0.05)
    assert sum(gauss) > sum(signs)
    assert float((mean - gradient).norm() / gradient.norm()) < 2 * math.sqrt(expected / 60)


def _scattered(values_of: Any, size: int, dimension: int, source: torch.Generator) -> Scattered:
    return Scattered(values_of((1, size, 4), source), distinct_positions(1, size, dimension, 4, source), dimension)


def _gaussian(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=source) / shape[-1] ** 0.5


def test_a_gradient_that_lies_in_a_subspace_of_blocks_is_found_and_a_learned_fit_is_no_worse_than_its_beginning() -> None:
    planted = drawn((1, 24, 8), 1), drawn((1, 32, 8), 2)
    mask = [torch.zeros_like(each) for each in planted]
    for zeros in mask:
        for group in range(4):
            rows = zeros.shape[1] // 4
            zeros[:, group * rows : (group + 1) * rows, 2 * group : 2 * group + 2] = 1
    left, right = (each * zeros for each, zeros in zip(planted, mask, strict=True))
    gradient = left @ drawn((1, 8, 8), 3) @ right.transpose(1, 2)
    assert float(relative_error(fitted("block", gradient, 8, 2), gradient)) < 1e-3
    noise = drawn((2, 24, 32), 4)
    learned, random = (float(relative_error(fitted(kind, noise, 8, 2, seed=3), noise)) for kind in ("learned", "random"))
    assert learned < 0.97 < random, "the best scale alone is better than random projectors, and a descent than that"


@pytest.mark.parametrize("kind", KINDS)
def test_moments_move_as_what_they_stand_for(kind: str) -> None:
    """To the same projectors of orthonormal columns nothing moves; a first moment is decompressed and compressed again."""
    shape = (2, 24, 32)
    one, other = fitted(kind, drawn(shape, 1), 8, 2, 1), fitted(kind, drawn(shape, 2), 8, 2, 2)
    moment = one.compress(drawn(shape, 3))
    moved = one.move(other, moment, square=False)
    torch.testing.assert_close(moved, other.compress(one.decompress(moment)), rtol=1e-3, atol=1e-3)
    assert (one.move(other, moment.abs(), square=True) >= 0).all()
    if kind == "block":
        torch.testing.assert_close(one.move(one, moment, square=False), moment, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.move(one, moment.abs(), square=True), moment.abs(), rtol=1e-4, atol=1e-4)


def test_small_sides_keep_the_identity_and_packed_experts_are_a_matrix_each() -> None:
    layout = lay_out(
        "block",
        [
            ("experts.up", (3, 40, 20), (1.0, 0.1)),
            ("small.weight", (20, 20), (1.0, 0.1)),
            ("conv.weight", (40, 1, 4), (1.0, 0.1)),
            ("norm.weight", (40,), (1.0, 0.0)),
        ],
    )
    found: tuple[Subspace, ...] = subspaces(layout, 24, 8, PROJECTORS["block"])
    assert [(each.name, each.shape, each.dimensions) for each in found] == [("experts.up", (3, 24, 20), Sides(24, None))]
