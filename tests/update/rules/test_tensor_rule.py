"""Rules of whole rows and matrices keep their contract; the doubles compute what they say."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.terms.cuts import pieces_of
from headrace.terms.errors import ConfigError
from headrace.terms.layout import UNIT_ALIGNMENT, ItemRange, lay_out
from headrace.terms.rule_figures import Grain
from headrace.testing.item_rules import MatrixScaled, RowScaled, ScaledRule, register
from headrace.testing.rule_contract import gradient_of, on_tensors
from headrace.testing.tensor_rule_contract import PARAMETERS, STEP, TensorRuleContract, check_same_bits
from headrace.update import DeviceUpdater, Updater
from headrace.update.rules.rule import Chunk
from headrace.update.rules.sgd import SGD, sgd_rule
from headrace.update.rules.table import RULES
from headrace.update.rules.tensor_rule import TensorRule, tree_sum
from headrace.update.rules.tensors import as_tensor


@pytest.fixture(autouse=True, scope="module")
def known() -> Iterator[None]:
    before = dict(RULES)
    register()
    yield
    RULES.clear()
    RULES.update(before)


class TestRowScaled(TensorRuleContract):
    optimizer = RowScaled()

    @pytest.mark.gpu
    def test_a_gpu_has_the_bits_of_the_host(self) -> None:
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        for rule, layout, name in self.rules():
            planes, gradient = self.planes(rule, layout), gradient_of(layout.num_elements, "uint16")
            weight, states = on_tensors(planes)
            there = weight.cuda(), tuple(state.cuda() for state in states)
            pieces = pieces_of(layout, rule.figures)
            DeviceUpdater(rule).update_range(Chunk(*there, as_tensor(gradient, bfloat16=True).cuda()), STEP, pieces)
            with Updater(rule, 2) as updater:
                updater.update_range(Chunk(*planes, gradient), STEP, pieces)
            check_same_bits(planes, there, name)


class TestMatrixScaled(TestRowScaled):
    optimizer = MatrixScaled()


def test_what_breaks_the_contract_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that is told from the whole piece, and temporaries that nobody declared."""
    suite, whole = TestMatrixScaled(), ScaledRule.on_items

    def by_piece(self: Any, p: Any, gradient: Any, states: Any, scalars: Any) -> Any:
        return whole(self, p, gradient / gradient.abs().max(), states, scalars)

    def wasteful(self: Any, p: Any, gradient: Any, states: Any, scalars: Any) -> Any:
        _ = [gradient + number for number in range(4)]
        return whole(self, p, gradient, states, scalars)

    monkeypatch.setattr(ScaledRule, "on_items", by_piece)
    with pytest.raises(AssertionError, match="matrix-scaled"):
        suite.test_an_item_is_updated_as_if_it_were_alone()
    monkeypatch.setattr(ScaledRule, "on_items", wasteful)
    with pytest.raises(AssertionError, match="bytes per element"):
        suite.test_what_it_takes_is_declared()


@pytest.mark.parametrize("optimizer", [RowScaled(), MatrixScaled()])
def test_it_is_what_the_formula_says(optimizer: RowScaled) -> None:
    """In float64, item by item, from the shapes of the parameters alone."""
    rule, known = ScaledRule(optimizer, "float32"), {name: (shape, scalars) for name, shape, scalars in PARAMETERS}
    layout = lay_out("block.1", PARAMETERS, rule.figures.parameter_alignment)
    weight, buffer, gradient = np.random.default_rng(1).standard_normal((3, layout.num_elements), np.float32)
    p, m, g = (array.astype(np.float64) for array in (weight, buffer, gradient * 0.5))
    with Updater(rule, 2) as updater:
        updater.update_range(Chunk(weight, (buffer,), gradient), STEP, pieces_of(layout, rule.figures))
    for each in layout.parameters:
        place, (shape, (scale, decay)) = slice(each.offset, each.offset + each.num_elements), known[each.name]
        theirs = g[place].reshape(shape)
        if each.name in ("long", "odd", "stack"):
            by_matrix = rule.figures.grain is Grain.MATRIX
            squares = theirs**2
            theirs = theirs / np.sqrt(squares.sum((-2, -1), keepdims=True) if by_matrix else squares.mean(-1, keepdims=True))
        expected = 0.9 * m[place] + theirs.reshape(-1) + decay * p[place]
        np.testing.assert_allclose(buffer[place], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(weight[place], p[place] - 1e-2 * scale * expected, rtol=1e-5, atol=1e-6)


def test_sums_are_in_one_order_and_exact_where_they_can_be() -> None:
    values = torch.arange(2 * 3 * 7, dtype=torch.float32).view(2, 3, 7)
    assert torch.equal(tree_sum(values), values.sum((1, 2), keepdim=True))
    for size in (1, 2, 255, 256, 1000):
        drawn = torch.randn(4, 1, size, generator=torch.Generator().manual_seed(size))
        one_by_one = torch.cat([tree_sum(drawn[index : index + 1]) for index in range(4)])
        assert torch.equal(tree_sum(drawn), one_by_one)


def test_what_does_not_go_together_is_refused() -> None:
    rule = ScaledRule(MatrixScaled(), "float32")
    items = ItemRange(0, UNIT_ALIGNMENT, 1.0, 0.0, 32, 64)
    weight, state = torch.zeros(1000), torch.zeros(1000)
    with pytest.raises(ConfigError, match="1000 elements are no whole items of 32 x 64"):
        rule.apply_to_items(weight, (state,), weight.clone(), STEP, items)
    arrays = np.zeros(UNIT_ALIGNMENT, np.float32), (np.zeros(UNIT_ALIGNMENT, np.float32),)
    with Updater(sgd_rule(SGD(), "float32"), 1) as updater, pytest.raises(ConfigError, match="updates elements alone"):
        updater.update_range(Chunk(*arrays, arrays[0].copy()), STEP, [items])
    for figures, alone in (
        (replace(rule.figures, grain=Grain.ELEMENT), sgd_rule(SGD(), "float32")),
        (rule.figures, sgd_rule(SGD(momentum=0.0), "float32")),
    ):
        with pytest.raises(ConfigError, match="have the planes of the rule of elements alone"):
            TensorRule.__init__(rule, figures, alone)
