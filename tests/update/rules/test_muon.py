"""Muon keeps the contract of rules of matrices, and is `torch.optim.Muon` beside `torch.optim.AdamW`."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.terms.cuts import cuts_of, num_values, pieces_of, product_flops
from headrace.terms.forms import SSD, Form, merged
from headrace.terms.layout import SCALE, ItemRange, Plane, lay_out
from headrace.testing.tensor_rule_contract import PARAMETERS, TensorRuleContract
from headrace.update import StepScalars, Updater, rule_of
from headrace.update.rules.muon import Muon, orthogonal
from headrace.update.rules.rule import Chunk
from headrace.update.rules.tensor_rule import items_rule

RATE, DECAY = 1e-2, 0.1


class TestMuon(TensorRuleContract):
    optimizer = Muon()
    compute_dtypes = ("bfloat16",)

    def state(self, plane: Plane, num_elements: int, seed: int) -> NDArray[np.generic]:
        drawn = super().state(plane, num_elements, seed)
        return np.square(drawn) if plane.of == "alone" else drawn


@pytest.mark.deep
class TestMuonInOtherTypes(TestMuon):
    compute_dtypes = ("float32", "float16")


@pytest.mark.parametrize("nesterov", [True, False])
def test_it_follows_torch(nesterov: bool) -> None:
    """Matrices wide, tall and of odd shapes, each expert of a stack, a vector; an embedding stands in a unit of its own."""
    rule = items_rule(rule_of(Muon(nesterov=nesterov), "float32"))
    rng = np.random.default_rng(1)
    for unit, kept in (("block.1", PARAMETERS), ("prologue", PARAMETERS[-1:])):
        layout = lay_out(unit, kept, rule.figures.parameter_alignment)
        cuts, pieces = cuts_of(layout, rule.figures), pieces_of(layout, rule.figures)
        weight = rng.standard_normal(layout.num_elements, np.float32)
        states = [np.zeros(num_values(plane, 0, layout.num_elements, cuts), np.float32) for plane in rule.planes.states]
        parameters: dict[str, list[torch.nn.Parameter]] = {}
        steps: list[torch.optim.Optimizer] = []
        for spec in layout.parameters:
            scale, decay = next(scalars for name, _, scalars in kept if name == spec.name)
            whole = torch.from_numpy(weight[spec.offset : spec.offset + spec.num_elements].copy())
            whole = whole.view(-1, *(spec.shape[-2:] if len(spec.shape) > 1 else spec.shape))
            own = parameters[spec.name] = [torch.nn.Parameter(each.clone()) for each in whole]
            if len(spec.shape) > 1 and unit != "prologue":
                of_torch = {"momentum": 0.95, "nesterov": nesterov, "adjust_lr_fn": "match_rms_adamw"}
                steps.append(torch.optim.Muon(own, lr=RATE * scale, weight_decay=decay, **of_torch))  # type: ignore[arg-type]
            else:
                steps.append(torch.optim.AdamW(own, lr=RATE * scale, weight_decay=decay, betas=(0.9, 0.95)))
        with Updater(rule, 2) as updater:
            for update in range(1, 7):
                gradient = rng.standard_normal(layout.num_elements, np.float32)
                for spec in layout.parameters:
                    its = np.split(gradient[spec.offset : spec.offset + spec.num_elements], len(parameters[spec.name]))
                    for one, own_gradient in zip(parameters[spec.name], its, strict=True):
                        one.grad = torch.from_numpy(own_gradient * np.float32(0.5)).view(one.shape)
                for each in steps:
                    each.step()
                step = StepScalars(learning_rate=RATE, update=update, gradient_scale=0.5)
                updater.update_range(Chunk(weight, tuple(states), gradient), step, pieces)
        for spec in layout.parameters:
            expected = torch.stack(tuple(parameters[spec.name])).detach().numpy().reshape(-1)
            found = weight[spec.offset : spec.offset + spec.num_elements]
            # Six steps of a root-mean-square of 0.2 of the rate; operands of products are rounded to a part in 256.
            np.testing.assert_allclose(found, expected, rtol=0, atol=6 * RATE * 0.01, err_msg=f"{unit}, {spec.name}")


@given(st.integers(2, 40), st.integers(2, 40), st.integers(0, 99), st.sampled_from([1e-3, 1.0, 1e6]))
@settings(max_examples=30, deadline=None)
def test_singular_values_come_near_one_whatever_the_size_and_a_transposed_matrix_is_the_same(
    rows: int, columns: int, seed: int, factor: float
) -> None:
    """Against the singular value decomposition in float64: the same spaces; values that began tiny may lag."""
    u = torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, columns), np.float32)) * factor
    found = orthogonal(u)
    left, values, right = torch.linalg.svd(u.double(), full_matrices=False)
    inside = left.mT @ found.double() @ right.mT
    large = values > 0.1 * values.max()
    assert ((inside.diagonal()[large] > 0.6) & (inside.diagonal()[large] < 1.3)).all(), inside.diagonal()
    assert (inside - torch.diag(inside.diagonal())).abs().max() < 0.06
    torch.testing.assert_close(orthogonal(u.mT.contiguous()), found.mT, rtol=0, atol=0.03)


def test_a_matrix_without_a_gradient_stays() -> None:
    rule = items_rule(rule_of(Muon(), "float32"))
    weight, m = torch.ones(12), torch.zeros(12)
    items = ItemRange(0, 12, 1.0, 0.0, 3, 4)
    rule.apply_to_items(weight, (m,), torch.zeros(12), StepScalars(learning_rate=RATE, update=1), items)
    assert torch.equal(weight, torch.ones(12))


def test_what_it_keeps_and_multiplies() -> None:
    """Second moments are of vectors alone, filters of one row and what is around blocks among them; products are counted."""
    rule = items_rule(rule_of(Muon(), "bfloat16"))
    given = [("up", (300, 200), (1.0, 0.1)), ("experts", (3, 40, 48), (1.0, 0.1)), ("filter", (96, 1, 4), (1.0, 0.1))]
    given += [("q_norm.weight", (8, 64), (1.0, 0.0)), ("bias", (77,), (1.0, 0.0))]
    layout = lay_out("block.1", given, rule.figures.parameter_alignment, {"q_norm.weight": SCALE})
    cuts, (_, m, v) = cuts_of(layout, rule.figures), rule.planes.states
    assert num_values(m, 0, layout.num_elements, cuts) == layout.num_elements
    # Each of the three lies on a page of 2048 elements, and what pads it is as if it were of it.
    assert num_values(v, 0, layout.num_elements, cuts) == 3 * 2048
    expected = 5 * (4 * 200**2 * 300 + 2 * 200**3) + 3 * 5 * (4 * 40**2 * 48 + 2 * 40**3)
    assert product_flops(rule.figures, 0, layout.num_elements, cuts) == expected
    # A coarse plan has several blocks as one unit.
    unit = Form(layout=layout, trained=layout, home=SSD, cuts=cuts).figures
    assert product_flops(rule.figures, 0, 2 * layout.num_elements, merged([unit, unit]).cuts) == 2 * expected
    around = lay_out("epilogue", [("lm_head.weight", (300, 200), (1.0, 0.1))], rule.figures.parameter_alignment)
    assert product_flops(rule.figures, 0, around.num_elements, cuts_of(around, rule.figures)) == 0
