"""Inputs of matrices are caught whatever multiplies them, in whichever way a weight is transposed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.model.chain.caught import CatchInputs, Enough, Inputs, Matrix, matrices_of, sum_operations, times_of_each_token

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


@pytest.mark.parametrize("columns", [255, 256, 600])
def test_sums_of_many_columns_are_whole_and_symmetric(columns: int) -> None:
    """Strips from the diagonal on, then completed: as float64 has it. Asked for twice, and added to between, it is the same."""
    rows = torch.randn(2, 40, columns, generator=torch.Generator().manual_seed(1))
    own = Inputs(torch.zeros(columns, columns))
    own.add(rows[0])
    assert own.hessian is own.hessian
    own.add(rows[1])
    both = rows.flatten(0, 1).double()
    torch.testing.assert_close(own.hessian.double(), both.T @ both, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(own.hessian, own.hessian.T, rtol=1e-5, atol=1e-4)
    assert own.tokens == 80
    assert sum_operations(columns) <= 2 * columns**2
    assert (columns > 256) == (sum_operations(columns) < 2 * columns**2)


@pytest.mark.parametrize("columns", [96, 600])
def test_sums_of_bfloat16_are_those_of_float32(columns: int) -> None:
    """A processor's products of bfloat16 lose nothing of numbers that are bfloat16; float32 inputs are never rounded to it."""
    wide = torch.randn(4096, columns, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    for rows in (wide.bfloat16(), wide):
        own = Inputs(torch.zeros(columns, columns, dtype=torch.float32))
        own.add(rows)
        exact = rows.double().T @ rows.double()
        assert float((own.hessian - exact).abs().max() / exact.diagonal().mean()) < 1e-5, "rounded ones are off by 1e-4"
    assert torch.backends.mkldnn.matmul.fp32_precision == before  # type: ignore[attr-defined]


def test_sums_of_any_number_of_rows_have_few_shapes() -> None:
    """Libraries keep machine code for each shape: of 16 experts it was a gigabyte."""
    shapes = set[tuple[int, ...]]()

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.addmm_.default:
                shapes.add(tuple(args[1].shape))
            return func(*args, **(kwargs or {}))

    rows = torch.randn(512, 40, generator=torch.Generator().manual_seed(3), dtype=torch.float32)
    with Noted():
        for number in (0, 1, 200, 257, 511, 512):
            own = Inputs(torch.zeros(40, 40, dtype=torch.float32))
            own.add(rows[:number])
            assert own.tokens == number
            torch.testing.assert_close(own.hessian, rows[:number].T @ rows[:number], rtol=1e-5, atol=1e-4)
    assert len(shapes) <= 3, shapes


def test_a_pass_ends_where_all_that_is_wanted_has_been_seen() -> None:
    """Only where every token is multiplied, and only after the last time: then the product itself is spared, too."""
    first, last, inner = (nn.Parameter(torch.randn(6, 6)) for _ in range(3))
    places = matrices_of({"first": first, "last": last, "inner": inner})

    def run(mode: CatchInputs) -> bool:
        """Run a block that multiplies by `last` twice; return whether the pass came to its end."""
        with torch.no_grad(), mode.of_rows(COUNTS):
            try:
                hidden = F.linear(TOKENS, first)
                hidden = F.linear(F.linear(hidden, last), inner)
                F.linear(hidden, last)
            except Enough:
                return False
        return True

    look = CatchInputs(places, ())
    assert run(look)
    by_name = {matrix.name: matrix for matrix in places.values()}
    for wanted in by_name:
        some = [by_name[wanted]]
        times = times_of_each_token(some, look.seen, TOKENS.shape[0] * TOKENS.shape[1])
        assert times == {some[0]: 2 if wanted == "last" else 1}
        whole, short = CatchInputs(places, some), CatchInputs(places, some, times=times)
        assert run(whole)
        assert not run(short)
        assert torch.equal(short.caught.inputs[some[0]].hessian, whole.caught.inputs[some[0]].hessian)
        assert short.caught.inputs[some[0]].tokens == whole.caught.inputs[some[0]].tokens
    assert not times_of_each_token(list(places.values()), {**look.seen, by_name["inner"]: 3}, 10), "some tokens only"
    assert not times_of_each_token([Matrix("inner", 0, (6, 6))], {Matrix("inner", 0, (6, 6)): 10}, 10), "an expert"
    assert not times_of_each_token([by_name["inner"]], {}, 10), "never seen"
