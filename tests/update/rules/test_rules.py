"""Each rule keeps the contract of rules."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_rules import PlainLion, PlainLomo

from headrace.terms.errors import ConfigError
from headrace.terms.options.optimizer import Optimizer
from headrace.testing.rule_contract import LEARNING_RATE, WEIGHT_DECAY, Planes, RuleContract
from headrace.update import StepScalars, UpdateRule, rule_of
from headrace.update.rules.adamw import AdamW
from headrace.update.rules.lion import Lion
from headrace.update.rules.lomo import Lomo
from headrace.update.rules.rule import Chunk
from headrace.update.rules.sgd import SGD
from headrace.update.rules.table import RULES


class TestAdamW(RuleContract):
    optimizer = AdamW(beta1=0.9, beta2=0.95, eps=1e-8)

    def reference(self, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "foreach": False}
        return torch.optim.AdamW([parameter], betas=(0.9, 0.95), eps=1e-8, **options)


@pytest.mark.wide
class TestAdamWWithSmallMoments(TestAdamW):
    optimizer = AdamW(beta1=0.9, beta2=0.95, eps=1e-8, moments="int8")
    tolerance = 1e-2  # rounded at random; a step is a thousandth


class TestSGD(RuleContract):
    optimizer = SGD(momentum=0.9)

    def reference(self, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "foreach": False}
        return torch.optim.SGD([parameter], momentum=0.9, nesterov=self.optimizer.nesterov, **options)


@pytest.mark.wide
class TestNesterov(TestSGD):
    optimizer = SGD(momentum=0.9, nesterov=True)


@pytest.mark.wide
class TestSGDWithoutMomentum(RuleContract):
    optimizer = SGD(momentum=0.0)

    def reference(self, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "foreach": False}
        return torch.optim.SGD([parameter], **options)


class TestLion(RuleContract):
    optimizer = Lion(beta1=0.9, beta2=0.99)
    compute_dtypes = ("bfloat16",)

    def reference(self, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        return PlainLion([parameter], lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=WEIGHT_DECAY)


@pytest.mark.deep
class TestLionInOtherTypes(TestLion):
    compute_dtypes = ("float32", "float16")


class TestLomo(RuleContract):
    optimizer = Lomo()
    compute_dtypes = ("bfloat16",)
    tolerance = 1e-5  # the reference does not round the decayed weight by itself

    def reference(self, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        return PlainLomo([parameter], lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)


@pytest.mark.deep
class TestLomoInOtherTypes(TestLomo):
    compute_dtypes = ("float32", "float16")


@pytest.mark.wide
class TestLomoWithoutMaster(RuleContract):
    optimizer = Lomo(master="none")
    compute_dtypes = ("bfloat16",)
    tolerance = 1e-5

    def reference(self, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        return PlainLomo([parameter], lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def planes(self, rule: UpdateRule, num_elements: int) -> Planes:
        return super().planes(rule_of(Lomo(), "bfloat16"), num_elements)[0], ()

    # There is none; the next test has what holds instead.
    test_every_master_goes_through_the_same_numbers = None  # type: ignore[assignment]


@given(st.floats(2.0**-10, 2.0), st.floats(-1.0, 1.0), st.integers(1, 1000), st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_weights_without_a_master_are_rounded_without_bias(weight: float, gradient: float, update: int, unit: int) -> None:
    """Each becomes one of the two numbers that the exact update lies between, in the mean that update; another time others."""
    rule, count, step = rule_of(Lomo(master="none"), "bfloat16"), 1 << 16, StepScalars(learning_rate=1e-3, update=update)
    hi = torch.full((count,), weight).bfloat16()
    exact = hi[0].double() * (1 - 1e-3 * 0.1) - 1e-3 * gradient
    found = hi.clone()
    rule.apply_to_tensors(Chunk(found, (), torch.full((count,), gradient), unit), step, 0.1, 1.0)
    place = 2.0 ** (torch.log2(exact.abs()).floor().item() - 7)
    assert (found.double() - exact).abs().max() < place * 1.001
    # Rounding up or down at most doubles the place where the result is a power of two: four deviations of the mean.
    assert abs(found.double().mean() - exact) < 4 * place / count**0.5
    other = hi.clone()
    rule.apply_to_tensors(Chunk(other, (), torch.full((count,), gradient), unit), replace(step, update=update + 1), 0.1, 1.0)
    assert len(found.unique()) == 1 or not torch.equal(other, found)


def test_a_weight_that_bfloat16_has_stays_and_rounding_to_the_nearest_would_lose_small_steps() -> None:
    rule, weights = rule_of(Lomo(master="none"), "bfloat16"), torch.linspace(-3, 3, 4097).bfloat16()
    found, gradient, step = weights.clone(), torch.ones(4097), StepScalars(learning_rate=0.0, update=3)
    rule.apply_to_tensors(Chunk(found, (), gradient, 2), step, 0.1, 1.0)
    assert torch.equal(found.view(torch.int16), weights.view(torch.int16))
    ones = torch.ones(1 << 14).bfloat16()
    assert torch.equal((ones.float() + 1e-4).bfloat16(), ones)
    rule.apply_to_tensors(Chunk(ones, (), -torch.ones(1 << 14), 2), replace(step, learning_rate=1e-4), 0.0, 1.0)
    assert 1.0 < float(ones.double().mean()) < 1.0002


def test_lomo_without_decay_is_sgd() -> None:
    """`torch.optim.SGD` in fp32, bit for bit."""
    rule, rng = rule_of(Lomo(), "float32"), np.random.default_rng(0)
    weight = rng.standard_normal(2048, np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(weight.copy()))
    reference = torch.optim.SGD([parameter], lr=0.125, foreach=False)  # a rate with which products are exact
    for update in range(1, 20):
        gradient = rng.standard_normal(2048, np.float32)
        parameter.grad = torch.from_numpy(gradient.copy())
        reference.step()
        rule.apply(Chunk(weight, (), gradient), StepScalars(learning_rate=0.125, update=update), 0.0, 1.0)
    assert np.array_equal(weight, parameter.detach().numpy())


def test_the_first_step_of_sgd_is_the_gradient_and_the_next_has_momentum() -> None:
    """In numbers that need no rounding: the decay is added to the gradient, and only then comes the rate."""
    rule = rule_of(SGD(momentum=0.5), "float32")
    weight, buffer = np.full(4, 1.0, np.float32), np.zeros(4, np.float32)
    gradient = np.full(4, 2.0, np.float32)
    for update, expected_buffer, expected in ((1, 2.5, 0.375), (2, 3.4375, -0.484375)):
        rule.apply(Chunk(weight, (buffer,), gradient), StepScalars(learning_rate=0.25, update=update), 0.5, 1.0)
        assert (buffer[0], weight[0]) == (expected_buffer, expected)


def test_sgd_takes_eight_bytes_of_a_parameter_and_adamw_twelve() -> None:
    sizes = {type(o).__name__: rule_of(o, "bfloat16").planes.num_bytes(1 << 20) >> 20 for o in (SGD(), AdamW())}
    assert sizes == {"SGD": 8, "AdamW": 12}


def test_the_table_of_rules_says_what_each_takes_and_gives_up() -> None:
    page = (Path(__file__).parents[3] / "docs" / "rules.md").read_text()
    sizes = {
        kind: sum(plane.bytes_per_element for plane in (planes.weight, *planes.states) if plane.of == "element")
        for kind in RULES
        for planes in (rule_of(kind(), "bfloat16").planes,)
    }
    rows = [f"| `{kind.name}` | {sizes[kind]} | {kind.gives_up or 'nothing'} |" for kind in RULES]
    assert [line for line in page.splitlines() if line.startswith("| `")] == rows


@pytest.mark.parametrize("momentum", [1.0, -0.5, float("nan")])
def test_a_momentum_that_cannot_be_is_refused(momentum: float) -> None:
    with pytest.raises(ConfigError, match="momentum: expected a number >= 0 and < 1"):
        SGD(momentum=momentum)


def test_an_optimizer_that_is_no_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not one of the rules AdamW, SGD, Lion, Lomo, AdaLomo, Adafactor, Muon"):
        rule_of(Optimizer(), "bfloat16")
    with pytest.raises(ConfigError, match="'int4' is not one of bfloat16"):
        rule_of(SGD(), "int4")


def test_what_breaks_the_contract_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A form on tensors that differs in one operation, costs that are not what it takes, a forgotten scalar."""
    suite, kind = TestSGD(), type(rule_of(SGD(), "float32"))
    whole = kind.on_tensors

    def without_decay(self: Any, p: Any, gradient: Any, states: Any, scalars: Any) -> Any:
        return whole(self, p, gradient, states, (scalars[0], 0.0, *scalars[2:]))

    monkeypatch.setattr(kind, "on_tensors", without_decay)
    with pytest.raises(AssertionError, match="SGD"):
        suite.test_the_form_on_tensors_has_the_bits_of_the_compiled_loops()
    monkeypatch.setattr(kind, "scalars", lambda self, step, decay, scale: (1.0, 0.0, 0.9, 0.0, step.learning_rate))
    with pytest.raises(AssertionError):
        suite.test_it_follows_its_reference()


def test_nothing_looks_ahead_without_momentum() -> None:
    with pytest.raises(ConfigError, match="nesterov: looks ahead by the momentum, which is 0"):
        SGD(momentum=0.0, nesterov=True)


def test_sgd_without_momentum_keeps_the_master_alone() -> None:
    assert rule_of(SGD(momentum=0.0), "float32").planes.states == ()
    assert rule_of(SGD(momentum=0.0), "bfloat16").planes.num_bytes(1 << 20) >> 20 == 4
