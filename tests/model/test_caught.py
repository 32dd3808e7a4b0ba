"""Inputs of matrices are caught whatever multiplies them, in whichever way a weight is transposed."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headrace.model.caught import CatchInputs, matrices_of

TOKENS = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
COUNTS = torch.tensor([[True] * 4 + [False], [False] + [True] * 4])


def caught(weight: nn.Parameter, multiply: Callable[[torch.Tensor, torch.Tensor], object]) -> dict[int | None, torch.Tensor]:
    """Return the sums by expert."""
    places = matrices_of({"w": weight})
    with torch.no_grad(), (mode := CatchInputs(places, places.values())):
        mode.begin(COUNTS)
        multiply(TOKENS, weight)
    return {matrix.expert: inputs.hessian for matrix, inputs in mode.caught.inputs.items()}


EXPECTED = TOKENS[COUNTS].T @ TOKENS[COUNTS]
WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "linear": lambda x, w: F.linear(x, w),
    "matmul": lambda x, w: torch.matmul(x, w.T),
    "the sign": lambda x, w: x @ w.mT,
    "mm": lambda x, w: torch.mm(x.flatten(0, 1), w.transpose(0, 1)),
    "by its name": lambda x, w: torch.matmul(input=x, other=w.t()),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_matrix(way: str) -> None:
    found = caught(nn.Parameter(torch.randn(6, 6)), WAYS[way])
    torch.testing.assert_close(found, {None: EXPECTED})


def test_a_stack_of_experts_that_are_multiplied_at_once() -> None:
    weight = nn.Parameter(torch.randn(3, 4, 6))
    for multiply in (
        lambda x, w: torch.bmm(x.flatten(0, 1).expand(3, -1, -1), w.mT),
        lambda x, w: torch.matmul(x.flatten(0, 1), w.transpose(1, 2)),
    ):
        torch.testing.assert_close(caught(weight, multiply), dict.fromkeys(range(3), EXPECTED))


def test_a_matrix_that_is_multiplied_as_it_lies_is_not_taken_for_its_transpose() -> None:
    assert not caught(nn.Parameter(torch.randn(6, 6)), torch.matmul)
    assert not caught(nn.Parameter(torch.randn(3, 6, 6)), lambda x, w: torch.bmm(x.flatten(0, 1).expand(3, -1, -1), w))
