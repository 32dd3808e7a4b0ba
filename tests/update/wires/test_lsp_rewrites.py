"""When LSP rewrites weights changes nothing but rounding: at each step, or once where projectors change. And factors of
matrices that lie either way.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.terms.layout import lay_out, part
from headrace.update.wires import Lsp, LspWire
from headrace.update.wires.factors import Factors

ROWS, COLUMNS = 24, 32


def test_plain_descent_in_a_subspace_moves_a_matrix_by_its_projected_gradient() -> None:
    """`W1 = W0 - lr P P^T G Q Q^T`, in float64, for descent without momentum and decay."""
    wire = LspWire(Lsp(dimension=16, nonzeros=4, projector="random"))
    layout = lay_out("block", [("w", (ROWS, COLUMNS), (1.0, 0.0))])
    trained = wire.trained(1, layout, is_block=True)
    assert trained is not None
    generator, (found,) = torch.Generator().manual_seed(3), wire._of(1, layout)
    basis = torch.zeros(wire.basis(1, layout, trained).num_elements)
    gradient = torch.randn(found.matrices, generator=generator)
    found.fit(wire._kind, gradient, basis, generator)
    pair, first = found.pair(wire._kind, basis), torch.randn(layout.num_elements, generator=generator)
    weights = torch.cat([wire.first_weights(1, layout, trained, first), basis])
    own = next(spec for spec in trained.parameters if spec.name == "w")
    part(weights, own).sub_(0.1 * pair.compress(gradient).reshape(-1))
    after = first.clone()
    wire.complete(1, layout, after, trained, weights)
    left, right = (
        side.reduce(torch.eye(size)[None])[0].T.double() for side, size in ((pair.left, ROWS), (pair.right, COLUMNS))
    )
    before, found_after = (each[: ROWS * COLUMNS].double().view(ROWS, COLUMNS) for each in (first, after))
    expected = before - 0.1 * left @ left.T @ gradient[0].double() @ right @ right.T
    torch.testing.assert_close(found_after, expected, rtol=1e-5, atol=1e-5)


@given(
    steps=st.integers(1, 24),
    seed=st.integers(0, 99),
    rate=st.sampled_from([1e-4, 1e-3, 1e-1]),
    decay=st.sampled_from([0.0, 0.1]),
    projector=st.sampled_from(["block", "random"]),
)
@settings(max_examples=12, deadline=None)
def test_a_merge_at_the_end_is_a_merge_at_each_step_but_for_a_rounding_each(
    steps: int, seed: int, rate: float, decay: float, projector: str
) -> None:
    """For one recorded sequence of directions the masters differ by at most (steps + 2) fp32 roundings of the largest number on
    the way; weights in bfloat16 then by one place at most.
    """
    wire = LspWire(Lsp(dimension=16, nonzeros=4, projector=projector))
    layout = lay_out("block", [("w", (ROWS, COLUMNS), (1.0, decay))])
    trained = wire.trained(1, layout, is_block=True)
    assert trained is not None
    own = {spec.name: spec for spec in trained.parameters}
    generator = torch.Generator().manual_seed(seed)
    (found,) = wire._of(1, layout)
    basis = torch.zeros(wire.basis(1, layout, trained).num_elements)
    found.fit(wire._kind, torch.randn(found.matrices, generator=generator), basis, generator)
    first = torch.zeros(layout.num_elements)
    first[: ROWS * COLUMNS] = torch.randn(ROWS * COLUMNS, generator=generator)
    directions = torch.randn(steps, *found.core, generator=generator)
    whole = torch.cat([wire.first_weights(1, layout, trained, first), basis])
    seldom, often, often_master, largest = whole.clone(), whole.clone(), first.clone(), 0.0
    keep = 1.0 - rate * decay
    for direction in directions:
        for numbers in (seldom, often):  # the rule's update, of S and of the factor
            core, factor = part(numbers, own["w"]), part(numbers, own[found.factor_name])
            core.copy_(core * keep - rate * direction.reshape(-1))
            factor.mul_(keep)
        wire.complete(1, layout, often_master, trained, often)
        wire.restart(1, layout, trained, often)
        core = part(seldom, own["w"]).view(found.core)
        learned = found.pair(wire._kind, basis).decompress(core)
        largest = max(largest, float(often_master.abs().max()), float(core.abs().max()), float(learned.abs().max()))
    seldom_master = first.clone()
    wire.complete(1, layout, seldom_master, trained, seldom)
    place = torch.finfo(torch.float32).eps * largest
    assert float((often_master - seldom_master).abs().max()) <= (steps + 2) * place
    one, other = often_master.bfloat16().float(), seldom_master.bfloat16().float()
    step = torch.finfo(torch.bfloat16).eps * torch.maximum(one.abs(), other.abs()) + (steps + 2) * place
    assert ((one - other).abs() <= step).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_the_product_of_factors_is_the_gradient_of_a_matrix_either_way(transposed: bool) -> None:
    layout = lay_out("block", [("w", (4, 6) if transposed else (6, 4), (1.0, 0.0)), ("b", (6,), (1.0, 0.0))])
    weights, inputs = torch.randn(layout.num_elements), torch.randn(5, 4, requires_grad=True)
    specs = {spec.name: spec for spec in layout.parameters}
    matrix, bias = (part(weights, specs[name]).view(specs[name].shape).requires_grad_() for name in "wb")
    given = torch.randn(5, 6)

    def product() -> torch.Tensor:
        return torch.addmm(bias, inputs, matrix) if transposed else F.linear(inputs, matrix, bias)

    expected = torch.autograd.grad(product(), (matrix, bias, inputs), given)
    taken: dict[str, torch.Tensor] = {}

    def take(name: str, rows: torch.Tensor, columns: torch.Tensor) -> None:
        taken[name] = rows.T @ columns

    with Factors(layout, weights, take, {"w"}):
        found = torch.autograd.grad(product(), (matrix, bias, inputs), given, allow_unused=True)
    assert found[0] is None
    for one, other in zip((taken["w"], *found[1:]), expected, strict=True):
        torch.testing.assert_close(one, other)
