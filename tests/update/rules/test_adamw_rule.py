"""The compiled AdamW: the bits of the reference, the numbers of torch, and a refusal of arrays that do not fit."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import pairwise, sampled
from update_planes import (
    COMPUTE_DTYPES,
    STEP,
    adamw,
    as_array,
    as_tensor,
    copied,
    gradient_of,
    ordinary,
    planes_of,
    same_bits,
    same_planes,
    wild,
)

from headrace.terms.errors import ConfigError
from headrace.update import GRADIENT_DTYPES, StepScalars
from headrace.update.rules.adamw import AdamW, AdamWRule
from headrace.update.rules.rule import Chunk
from headrace.update.rules.tensors import join

steps = st.builds(
    StepScalars,
    learning_rate=st.sampled_from([0.0, 1e-6, 1e-3, 0.5]),
    update=st.integers(1, 100_000),
    gradient_scale=st.sampled_from([1.0, 0.37, 2.0**-16]),
)
rules = st.builds(
    AdamW,
    beta1=st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.999]),
    beta2=st.sampled_from([0.0, 0.95, 0.999]),
    eps=st.sampled_from([1e-8, 1e-15, 1e-3]),
)


def check_against_reference(planes, gradient, rule, step, weight_decay, learning_rate_scale):
    tensors = as_tensor(planes[0].copy(), bfloat16=True), tuple(as_tensor(state.copy()) for state in planes[1])
    scalars = (step, weight_decay, learning_rate_scale)
    rule.apply_to_tensors(Chunk(*tensors, as_tensor(gradient, bfloat16=True)), *scalars)
    rule.apply(Chunk(*planes, gradient), *scalars)
    assert same_planes(planes, (as_array(tensors[0]), tuple(as_array(state) for state in tensors[1])))


@pytest.mark.parametrize("gradient_dtype", sampled(GRADIENT_DTYPES))
@pytest.mark.parametrize("compute_dtype", sampled(COMPUTE_DTYPES))
@settings(max_examples=25, deadline=None)
@given(
    num_elements=st.integers(0, 3000),
    seed=st.integers(0, 1 << 30),
    optimizer=rules,
    step=steps,
    weight_decay=st.sampled_from([0.0, 0.1]),
    learning_rate_scale=st.sampled_from([1.0, 0.1]),
)
def test_bits_of_the_reference(
    compute_dtype, gradient_dtype, num_elements, seed, optimizer, step, weight_decay, learning_rate_scale
):
    gradient = gradient_of(num_elements, seed, gradient_dtype)
    check_against_reference(
        ordinary(num_elements, seed, compute_dtype),
        gradient,
        AdamWRule(optimizer, compute_dtype),
        step,
        weight_decay,
        learning_rate_scale,
    )


@pairwise(compute_dtype=COMPUTE_DTYPES, gradient_dtype=GRADIENT_DTYPES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30), optimizer=rules, step=steps)
def test_bits_of_the_reference_for_any_bit_pattern(compute_dtype, gradient_dtype, seed, optimizer, step):
    gradient = gradient_of(4096, seed, gradient_dtype, any_bits=True)
    check_against_reference(wild(4096, seed, compute_dtype), gradient, AdamWRule(optimizer, compute_dtype), step, 0.1, 1.0)


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float16"])
def test_split_and_half_planes_follow_the_fp32_planes(compute_dtype):
    """The master of every plane set goes through the same numbers as plain fp32 weights."""
    single = ordinary(4096, 1, "float32")
    other = planes_of(single[0], *single[1], compute_dtype)
    for update in range(1, 30):
        step = dataclasses.replace(STEP, update=update)
        gradient = gradient_of(4096, update, "float32")
        adamw("float32").apply(Chunk(*single, gradient), step, 0.1, 1.0)
        adamw(compute_dtype).apply(Chunk(*other, gradient), step, 0.1, 1.0)
    master = other[1][0]
    if compute_dtype == "bfloat16":
        master = join(as_tensor(other[0], bfloat16=True), as_tensor(master)).numpy()
    assert same_bits(master, single[0])
    weights = torch.from_numpy(master)
    if compute_dtype == "float16":
        assert same_bits(other[0], weights.to(torch.float16).numpy())
    else:
        rounded = as_tensor(other[0], bfloat16=True).to(torch.float32)
        assert ((rounded - weights).abs() <= weights.abs() * 2.0**-8).all()


@pytest.mark.parametrize(("beta1", "weight_decay"), [(0.9, 0.0), (0.9, 0.1), (0.4, 0.1), (0.0, 0.0)])
def test_follows_torch_adamw(beta1, weight_decay):
    """Over 300 steps: each step within rounding of torch in fp32, and as near to a double-precision run as torch is."""
    num_elements, steps = 2048, 300
    master = np.random.default_rng(0).standard_normal(num_elements).astype(np.float32)
    planes = planes_of(master, np.zeros_like(master), np.zeros_like(master), "float32")
    runs = {}
    for dtype in (torch.float32, torch.float64):
        parameter = torch.nn.Parameter(torch.from_numpy(master.copy()).to(dtype))
        optimizer = torch.optim.AdamW(
            [parameter], lr=1e-3, betas=(beta1, 0.95), eps=1e-8, weight_decay=weight_decay, foreach=False
        )
        runs[dtype] = (parameter, optimizer)
    for update in range(1, steps + 1):
        gradient = gradient_of(num_elements, update, "float32")
        for dtype, (parameter, optimizer) in runs.items():
            parameter.grad = torch.from_numpy(gradient).to(dtype)
            optimizer.step()
        step = StepScalars(learning_rate=1e-3, update=update)
        adamw("float32", beta1=beta1).apply(Chunk(*planes, gradient), step, weight_decay, 1.0)
    single, double = (runs[dtype][0].detach().double().numpy() for dtype in (torch.float32, torch.float64))
    moved = np.abs(double - master).max()
    # A step rounds the weight once, by 2^-25 of it at most on average: 300 steps at random stay within 2e-6 of weights near 4.
    np.testing.assert_allclose(planes[0], single, rtol=0, atol=3e-6)
    assert np.abs(planes[0] - double).max() <= 2 * np.abs(single - double).max()
    assert moved > 1e-2


def test_one_step_is_within_three_roundings_of_torch():
    planes = ordinary(1 << 16, 3, "float32")
    gradient = gradient_of(1 << 16, 3, "float32")
    parameter = torch.nn.Parameter(torch.from_numpy(planes[0].copy()))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    m, v = (torch.from_numpy(state.copy()) for state in planes[1])
    optimizer.state[parameter] = {"step": torch.tensor(2.0), "exp_avg": m, "exp_avg_sq": v}
    parameter.grad = torch.from_numpy(gradient * np.float32(0.5))
    optimizer.step()
    adamw("float32").apply(Chunk(*planes, gradient), STEP, 0.1, 1.0)
    np.testing.assert_array_max_ulp(planes[1][1], v.numpy(), 3)
    # m and the weight are differences: their error is relative to the larger operand, and the update is about 1e-3.
    np.testing.assert_allclose(planes[1][0], m.numpy(), rtol=3e-7, atol=1e-8)
    np.testing.assert_allclose(planes[0], parameter.detach().numpy(), rtol=2.0**-23, atol=1e-9)


def test_learning_rate_scale_multiplies_rate_and_decay():
    scaled, plain = ordinary(4096, 2, "bfloat16"), ordinary(4096, 2, "bfloat16")
    gradient = gradient_of(4096, 2, "uint16")
    adamw("bfloat16").apply(Chunk(*scaled, gradient), STEP, 0.1, 0.25)
    adamw("bfloat16").apply(Chunk(*plain, gradient), dataclasses.replace(STEP, learning_rate=STEP.learning_rate / 4), 0.1, 1.0)
    assert same_planes(scaled, plain)


def test_beta1_zero_keeps_no_memory():
    """The moment is the gradient itself, however large the moment before was."""
    planes = ordinary(64, 2, "float32")
    planes[1][0][:] = 1e30
    gradient = gradient_of(64, 2, "float32")
    rule = adamw("float32", beta1=0.0)
    rule.apply(Chunk(*planes, gradient), dataclasses.replace(STEP, gradient_scale=1.0), 0.0, 1.0)
    assert same_bits(planes[1][0], gradient)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])
def test_nan_stays_nan_in_the_weight_that_compute_sees(bits):
    hi, (lo, m, v) = planes_of(np.ones(8, np.float32), np.zeros(8, np.float32), np.zeros(8, np.float32), "bfloat16")
    gradient = np.full(8, bits, np.uint32).view(np.float32)
    adamw("bfloat16").apply(Chunk(hi, (lo, m, v), gradient), STEP, 0.0, 1.0)
    assert (hi == 0x7FC0).all()
    assert (lo == 0).all()


def test_gradient_types_agree_where_they_can():
    """The same numbers in bfloat16, float16 and float32 make the same update."""
    values = np.arange(-128, 128, dtype=np.float32) / 8
    forms = ((values.view(np.uint32) >> 16).astype(np.uint16), values.astype(np.float16), values)
    results = [ordinary(256, 4, "bfloat16") for _ in forms]
    for planes, gradient in zip(results, forms, strict=True):
        adamw("bfloat16").apply(Chunk(*planes, gradient), STEP, 0.1, 1.0)
    assert same_planes(results[0], results[1])
    assert same_planes(results[0], results[2])


@pytest.mark.parametrize("name", ["weight", "state", "gradient", "fewer states", "strided", "two dimensions", "dtype"])
def test_arrays_that_do_not_fit_are_refused_untouched(name):
    weight, states = ordinary(64, 5, "bfloat16")
    gradient = gradient_of(64, 5, "uint16")
    before = copied((weight, states))
    broken = {
        "weight": (weight[:32], states, gradient),
        "state": (weight, (states[0], states[1][:63], states[2]), gradient),
        "gradient": (weight, states, gradient[1:]),
        "fewer states": (weight, states[:2], gradient),
        "strided": (weight[::2], tuple(state[:32] for state in states), gradient[:32]),
        "two dimensions": (weight.reshape(8, 8), states, gradient),
        "dtype": (weight, states, gradient.astype(np.float64)),
    }[name]
    with pytest.raises(ConfigError, match=r"update: .*(found|planes)"):
        adamw("bfloat16").apply(Chunk(*broken), STEP, 0.1, 1.0)
    assert same_planes((weight, states), before)


def test_unknown_compute_dtype_and_impossible_scalars_are_refused():
    with pytest.raises(ConfigError, match="'int4' is not one of bfloat16"):
        adamw("int4")
    with pytest.raises(ConfigError, match="counted from 1, found 0"):
        dataclasses.replace(STEP, update=0)
    with pytest.raises(ConfigError, match="skip the step"):
        dataclasses.replace(STEP, gradient_scale=float("nan"))
