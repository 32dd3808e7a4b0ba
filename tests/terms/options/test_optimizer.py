"""Options of the update that would make weights of NaN, or fail only in the first step, are refused when they are given.

Run: pytest tests/terms/options/test_optimizer.py
"""

import math
from typing import Any

import pytest

from headrace.terms.errors import ConfigError
from headrace.terms.options.optimizer import ParameterGroup, Schedule
from headrace.update.rules.adamw import AdamW


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_numbers_that_no_update_can_use(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        AdamW(**{name: value})


@pytest.mark.parametrize(
    "values",
    [
        {"pattern": "("},
        {"pattern": "x", "weight_decay": math.nan},
        {"pattern": "x", "weight_decay": -0.1},
        {"pattern": "x", "learning_rate_scale": math.inf},
        {"pattern": "x", "learning_rate_scale": -1.0},
    ],
)
def test_groups_that_no_update_can_use(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=list(values)[-1]):
        ParameterGroup(**values)


@pytest.mark.parametrize("name", ["beta1", "beta2"])
@pytest.mark.parametrize("value", [1.0, -0.1, math.nan])
def test_moments_that_never_decay_or_grow(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected a number >= 0 and < 1, found {value}"):
        AdamW(**{name: value})


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_schedule_that_falls_says_over_how_many_steps(kind: str) -> None:
    """Otherwise the second step would have a learning rate of 0."""
    with pytest.raises(ConfigError, match="total_steps, found 0"):
        Schedule(kind)
    assert Schedule(kind, 0, 4).factor(1) > 0


def test_a_schedule_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="'step' is not one of constant, linear, cosine"):
        Schedule("step")


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "total", "share"), [(10, 4, "0.3"), (4, 4, "0.75"), (1, 1, "0")])
def test_a_warm_up_that_the_run_does_not_outlast_is_told(kind: str, warmup: int, total: int, share: str) -> None:
    told = Schedule(kind, warmup, total).warning
    assert told.startswith(f"warmup_steps: {warmup} steps of warm-up in a run of {total}. ")
    assert f"ends at {share} of what was asked" in told


@pytest.mark.parametrize("schedule", [Schedule("constant", 10), Schedule("cosine", 3, 4), Schedule("linear", 0, 1)])
def test_a_warm_up_that_ends_is_not_told(schedule: Schedule) -> None:
    assert not schedule.warning
