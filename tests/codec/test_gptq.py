"""GPTQ against its definition: with H = I it rounds, blocks and batches change nothing, products are better than rounding's.

Run: pytest tests/codec/test_gptq.py
"""

import gc

import pytest
import torch

from headrace.codec import Grid, Int4Grid, TernaryGrid, gptq, nearest, product_errors
from headrace.codec.grids import PrunedGrid

GRIDS = [Int4Grid(group=16), TernaryGrid(), PrunedGrid(group=16)]


def correlated(num: int, rows: int, columns: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (num, rows, columns), and the Hessians of inputs whose columns depend on one another."""
    generator = torch.Generator().manual_seed(num * 1000 + columns)
    weights = torch.randn(num, rows, columns, generator=generator, dtype=dtype) * 0.05
    mix = torch.randn(num, columns, columns, generator=generator, dtype=dtype) / columns**0.5
    inputs = torch.randn(num, 4 * columns, columns, generator=generator, dtype=dtype) @ (mix + 0.5 * torch.eye(columns))
    return weights.to(torch.bfloat16).to(dtype), inputs.mT @ inputs


def by_definition(weights: torch.Tensor, hessian: torch.Tensor, grid: Grid) -> torch.Tensor:
    """GPTQ of one matrix, a column at a time, with the inverse of what is left of H found anew each time."""
    columns = weights.shape[1]
    damped = hessian + torch.eye(columns) * grid.damping * hessian.diagonal().mean()
    weights, found = weights.clone(), torch.empty(weights.shape, dtype=weights.dtype if grid.by_column else torch.uint8)
    side = grid.fit(weights, torch.ones(columns, dtype=weights.dtype))
    for column in range(columns):
        inverse = torch.linalg.inv(damped[column:, column:])
        if grid.group and column % grid.group == 0:
            # How much an error in a column costs, after the later ones have made up for it.
            costs = torch.stack([torch.linalg.inv(damped[at:, at:])[0, 0] for at in range(column, columns)])[: grid.group]
            side = grid.fit(weights[:, column : column + grid.group], costs.min() / costs)
        own = side[:, [column % grid.group]] if grid.by_column and grid.group else side
        code = grid.round(weights[:, column : column + 1], own)
        found[:, column] = code[:, 0]
        error = (weights[:, column] - grid.values(code, own)[:, 0]) / inverse[0, 0]
        weights[:, column:] -= error[:, None] * inverse[0]
    return found


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_it_is_its_definition(grid: Grid) -> None:
    weights, hessians = correlated(1, 24, 48)
    assert torch.equal(gptq(weights, hessians, grid).codes[0], by_definition(weights[0], hessians[0], grid))


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_with_the_identity_it_rounds(grid: Grid) -> None:
    weights, _ = correlated(3, 20, 64, torch.float32)
    found, expected = gptq(weights, torch.eye(64).expand(3, 64, 64) * 7, grid), nearest(weights, grid)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.values, expected.values)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_neither_blocks_nor_the_batch_nor_the_scale_of_h_change_anything(grid: Grid) -> None:
    weights, hessians = correlated(3, 24, 96)
    expected = gptq(weights, hessians, grid)
    for block_columns in (1, 40, 64, 256):
        assert torch.equal(gptq(weights, hessians, grid, block_columns=block_columns).codes, expected.codes), block_columns
    for one in range(3):
        assert torch.equal(gptq(weights[one : one + 1], hessians[one : one + 1], grid).codes[0], expected.codes[one])
    assert torch.equal(gptq(weights, hessians * 1024, grid).codes, expected.codes)


@pytest.mark.parametrize(
    ("grid", "least_gain"), [(Int4Grid(group=16), 1.5), (TernaryGrid(), 1.3)], ids=lambda value: str(value)
)
def test_products_are_better_than_with_rounding(grid: Grid, least_gain: float) -> None:
    weights, hessians = correlated(2, 64, 96)
    values = gptq(weights, hessians, grid).values, nearest(weights, grid).values
    ours, rounding = product_errors(weights, hessians, *values)
    assert bool((ours * least_gain < rounding).all()), f"{ours} against {rounding}"


def test_errors_are_those_of_the_products() -> None:
    """Of more columns than are multiplied at once; and zero where there are no products."""
    torch.manual_seed(2)
    inputs, weights, other = (torch.randn(2, rows, 1100, dtype=torch.float64) for rows in (40, 3, 3))
    inputs[1] = 0
    products, differences = weights @ inputs.mT, (other - weights) @ inputs.mT
    expected = [float(differences[0].square().sum() / products[0].square().sum()), 0.0]
    (found,) = product_errors(weights, inputs.mT @ inputs, other)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_no_choice_of_codes_for_a_small_matrix_is_much_better() -> None:
    """All 3^6 rows of codes are tried."""
    weights, hessians = correlated(1, 8, 6)
    grid = TernaryGrid()
    found = gptq(weights, hessians, grid)
    every = torch.cartesian_prod(*[torch.arange(3, dtype=torch.uint8)] * 6)
    for row in range(8):
        values = grid.values(every[None], found.sides[:, row : row + 1, 0].expand(1, len(every), 2))[0]
        cost = torch.einsum("ki,ij,kj->k", values - weights[0, row], hessians[0], values - weights[0, row])
        own = found.values[0, row] - weights[0, row]
        rounding = nearest(weights, grid).values[0, row] - weights[0, row]
        assert cost.min() * (1 - 1e-9) <= own @ hessians[0] @ own <= max(rounding @ hessians[0] @ rounding, 3 * cost.min())


def test_a_matrix_without_a_factor_is_rounded_and_named() -> None:
    weights, hessians = correlated(3, 16, 32, torch.float32)
    hessians[1] = -torch.eye(32)
    grid = TernaryGrid()
    found = gptq(weights, hessians, grid)
    assert found.failed == (1,)
    assert torch.equal(found.codes[1], nearest(weights, grid).codes[1])
    assert torch.equal(found.codes[2], gptq(weights[2:], hessians[2:], grid).codes[0])


def test_levels_are_of_the_row_as_it_came() -> None:
    weights, hessians = correlated(1, 32, 64, torch.float32)
    found = gptq(weights, hessians, TernaryGrid()).values[0]
    for row, levels in zip(weights[0], found, strict=True):
        assert set(levels.tolist()) <= {float(row.min()), 0.0, float(row.max())}


def test_three_matrices_as_wide_as_the_inputs_are_in_memory_while_a_factor_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of wide matrices each is a large part of memory: the sum, what is factored, and the factor."""
    columns, alive, factored = 37, list[int](), torch.linalg.cholesky_ex
    inputs = torch.randn(80, columns, generator=torch.Generator().manual_seed(3))

    def counted(matrix: torch.Tensor, **more: bool) -> object:
        found = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == (1, columns, columns)]
        alive.append(len({each.data_ptr() for each in found}))
        return factored(matrix, **more)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", counted)
    gptq(torch.randn(1, 8, columns), (inputs.mT @ inputs)[None], Int4Grid())
    assert alive == [2, 2], "the factor comes to these"
