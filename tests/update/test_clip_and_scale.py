"""Clipping as torch clips, and the loss scale as a value."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.terms.errors import ConfigError
from headrace.update import LossScale, clip_factor


@given(norm=st.floats(0, 1e30), limit=st.floats(1e-6, 1e6))
def test_factor_is_that_of_torch(norm, limit):
    gradient = torch.tensor([norm], dtype=torch.float64)
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_([parameter], limit)
    factor = clip_factor(norm, limit)
    assert factor is not None
    assert norm * factor == pytest.approx(float(parameter.grad), rel=1e-12)


def test_factor_is_at_most_one_and_absent_for_what_is_not_finite():
    assert clip_factor(0.0, 1.0) == 1.0
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) == pytest.approx(0.25, rel=1e-6)
    assert clip_factor(4.0, None) == 1.0
    for norm in (math.inf, math.nan):
        assert clip_factor(norm, 1.0) is None
        assert clip_factor(norm, None) is None


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_a_limit_that_is_not_positive_is_refused(limit):
    with pytest.raises(ConfigError, match="max_grad_norm"):
        clip_factor(1.0, limit)


def test_scale_grows_after_a_row_of_good_steps_and_shrinks_at_once():
    scale = LossScale(growth_interval_steps=3)
    for expected in (2.0**16, 2.0**16, 2.0**17, 2.0**17):
        scale = scale.after(True)
        assert scale.scale == expected
    scale = scale.after(False)
    assert (scale.scale, scale.good_steps) == (2.0**16, 0)


def test_scale_stays_within_bounds():
    scale = LossScale(growth_interval_steps=1)
    for _ in range(100):
        scale = scale.after(True)
    assert scale.scale == 2.0**32
    for _ in range(100):
        scale = scale.after(False)
    assert scale.scale == 1.0


@given(outcomes=st.lists(st.booleans(), max_size=60))
def test_scale_follows_the_scaler_of_torch(outcomes):
    """torch's own update of scale and growth tracker, step by step."""
    ours = LossScale(growth_interval_steps=4)
    scale, tracker = torch.full((1,), ours.scale), torch.zeros(1, dtype=torch.int32)
    for ok in outcomes[:14]:  # fewer than 16 halvings: torch has no lower bound
        torch._amp_update_scale_(scale, tracker, torch.tensor([0.0 if ok else 1.0]), 2.0, 0.5, 4)
        ours = ours.after(ok)
        assert (ours.scale, ours.good_steps) == (float(scale), int(tracker))


@given(outcomes=st.lists(st.booleans(), max_size=30))
def test_scale_survives_json(outcomes):
    scale = LossScale(growth_interval_steps=5)
    for ok in outcomes:
        scale = scale.after(ok)
    assert LossScale.from_json(json.loads(json.dumps(scale.to_json()))) == scale


@pytest.mark.parametrize(
    "fields", [{"scale": 0.0}, {"scale": math.inf}, {"growth": 1.0}, {"backoff": 1.0}, {"good_steps": 2000}, {"good_steps": -1}]
)
def test_a_scale_that_cannot_work_is_refused(fields):
    with pytest.raises(ConfigError, match="loss scale"):
        LossScale(**fields)


def test_json_of_something_else_is_refused():
    with pytest.raises(ConfigError, match="found scale"):
        LossScale.from_json({"scale": 1.0})
