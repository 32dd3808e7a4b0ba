"""AdaLomo and Adafactor keep the contract of rules of matrices, and are what their papers and torch say."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from plain_rules import PlainAdaLomo

from headrace.terms.cuts import cuts_of, num_values, pieces_of
from headrace.terms.errors import ConfigError
from headrace.terms.layout import ItemRange, Plane, lay_out
from headrace.terms.options.optimizer import Optimizer
from headrace.testing.tensor_rule_contract import PARAMETERS, TensorRuleContract
from headrace.update import StepScalars, Updater, rule_of
from headrace.update.rules.adafactor import Adafactor
from headrace.update.rules.adalomo import AdaLomo
from headrace.update.rules.rule import Chunk
from headrace.update.rules.tensor_rule import TensorRule, items_rule

RATE, DECAY = 1e-2, 0.1
REFERENCES: dict[type[Optimizer], Callable[[Any], torch.optim.Optimizer]] = {
    AdaLomo: lambda groups: PlainAdaLomo(groups, lr=RATE),
    Adafactor: lambda groups: torch.optim.Adafactor(groups, lr=RATE, foreach=False),
}


class TestAdaLomo(TensorRuleContract):
    optimizer = AdaLomo()
    compute_dtypes = ("bfloat16",)

    def state(self, plane: Plane, num_elements: int, seed: int) -> NDArray[Any]:
        drawn = super().state(plane, num_elements, seed)
        return np.square(drawn) + np.float32(1e-3) if plane.of == "sides" else drawn


@pytest.mark.deep
class TestAdaLomoInOtherTypes(TestAdaLomo):
    compute_dtypes = ("float32", "float16")


@pytest.mark.deep
class TestAdafactor(TestAdaLomo):
    optimizer = Adafactor()
    compute_dtypes = ("bfloat16", "float32", "float16")


def one_item(rule: TensorRule, shape: tuple[int, int], weight: Any, gradient: Any, sides: Any, **step: Any) -> None:
    """Update one matrix, or with one row a vector, in place."""
    items = ItemRange(0, weight.size, 1.0, step.pop("decay", 0.0), *shape)
    scalars = StepScalars(**{"learning_rate": RATE, "update": 1} | step)
    tensors = (torch.from_numpy(each) for each in (weight, sides, gradient))
    own, numbers, of_gradient = tensors
    rule.apply_to_items(own, (numbers,), of_gradient, scalars, items)


@pytest.mark.parametrize("optimizer", [AdaLomo(), Adafactor()], ids=["adalomo", "adafactor"])
def test_it_follows_its_reference(optimizer: Optimizer) -> None:
    """Matrices of odd shapes, vectors, and a stack whose matrices the reference has one by one."""
    rule = items_rule(rule_of(optimizer, "float32"))
    layout = lay_out("block.1", PARAMETERS, rule.figures.parameter_alignment)
    rng, cuts, pieces = np.random.default_rng(1), cuts_of(layout, rule.figures), pieces_of(layout, rule.figures)
    weight = rng.standard_normal(layout.num_elements, np.float32)
    sides = np.zeros(num_values(rule.planes.states[0], 0, layout.num_elements, cuts), np.float32)
    parameters, groups = {}, []
    for spec in layout.parameters:
        scale, decay = next(scalars for name, _, scalars in PARAMETERS if name == spec.name)
        shapes = spec.shape[-2:] if len(spec.shape) > 1 else spec.shape
        whole = torch.from_numpy(weight[spec.offset : spec.offset + spec.num_elements].copy()).view(-1, *shapes)
        parameters[spec.name] = [torch.nn.Parameter(each.clone()) for each in whole]
        groups.append({"params": parameters[spec.name], "weight_decay": decay, "lr": RATE * scale})
    reference = REFERENCES[type(optimizer)](groups)
    with Updater(rule, 2) as updater:
        for update in range(1, 13):
            gradient = rng.standard_normal(layout.num_elements, np.float32) * np.float32(10.0 if update == 7 else 0.1)
            for spec in layout.parameters:
                place = slice(spec.offset, spec.offset + spec.num_elements)
                for one, its in zip(parameters[spec.name], np.split(gradient[place], len(parameters[spec.name])), strict=True):
                    one.grad = torch.from_numpy(its * np.float32(0.5)).view(one.shape)
            reference.step()
            step = StepScalars(learning_rate=RATE, update=update, gradient_scale=0.5)
            updater.update_range(Chunk(weight, (sides,), gradient), step, pieces)
    for spec in layout.parameters:
        expected = torch.stack(tuple(parameters[spec.name])).detach().numpy().reshape(-1)
        found = weight[spec.offset : spec.offset + spec.num_elements]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5, err_msg=spec.name)


@given(st.integers(1, 9), st.integers(2, 9), st.integers(0, 99), st.sampled_from([1e-3, 1.0, 1e3]))
@settings(max_examples=30, deadline=None)
def test_steps_are_bounded_and_do_not_depend_on_the_size_of_gradients(
    rows: int, columns: int, seed: int, factor: float
) -> None:
    """And a gradient whose squares are of rank one has its moments exactly: the first step has the sign of the gradient."""
    rng, rule = np.random.default_rng(seed), items_rule(rule_of(AdaLomo(), "float32"))
    one = np.outer(rng.standard_normal(rows) + 3, rng.standard_normal(columns) + 3).astype(np.float32)
    for gradient, is_rank_one in ((one, True), (rng.standard_normal((rows, columns), np.float32), False)):
        moved = []
        for scale in (1.0, factor):
            weight, sides = np.ones(rows * columns, np.float32), np.zeros(columns if rows == 1 else rows + columns, np.float32)
            one_item(rule, (rows, columns), weight, gradient.reshape(-1) * np.float32(scale), sides)
            moved.append((1.0 - weight) / RATE)  # weights of 1 have a root-mean-square of 1
        np.testing.assert_allclose(moved[0], moved[1], rtol=0, atol=2e-4)
        assert np.sqrt(np.square(moved[0]).mean()) <= 1.0 + 1e-4
        if is_rank_one or rows == 1:
            np.testing.assert_allclose(moved[0], np.sign(gradient).reshape(-1), rtol=0, atol=1e-4)


def test_a_gradient_of_zero_changes_nothing_and_states_begin_anew_with_the_first() -> None:
    rule = items_rule(rule_of(AdaLomo(), "float32"))
    weight, sides = np.ones(6, np.float32), np.full(5, 7.0, np.float32)
    one_item(rule, (2, 3), weight, np.zeros(6, np.float32), sides)
    assert np.array_equal(weight, np.ones(6, np.float32))
    assert np.all(sides == np.float32(1e-30)), "beta2 is 0 at the first update"


def test_what_it_keeps_is_for_rows_and_columns_and_vectors_as_they_are() -> None:
    rule = items_rule(rule_of(Adafactor(), "bfloat16"))
    layout = lay_out("block.1", PARAMETERS, rule.figures.parameter_alignment)
    plane, cuts = rule.planes.states[-1], cuts_of(layout, rule.figures)
    assert num_values(plane, 0, layout.num_elements, cuts) == (300 + 200) + (37 + 101) + 3 * (40 + 48) + 77 + (64 + 50)
    with pytest.raises(ConfigError, match="updates whole rows or matrices, and was given elements"):
        rule.apply(np.zeros(32, np.uint16))
