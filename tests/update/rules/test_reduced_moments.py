"""Moments of 16 and 8 bits: the bits of the reference, however a unit is cut; no bias, no stall, small errors."""

import dataclasses

import numpy as np
import pytest
import torch
from tiers import pairwise
from update_planes import (
    COMPUTE_DTYPES,
    STEP,
    adamw,
    as_array,
    as_tensor,
    copied,
    gradient_of,
    ordinary,
    same_bits,
    same_planes,
    wild,
)

from headrace.machine.jit import compiled
from headrace.terms.errors import ConfigError
from headrace.terms.layout import UNIT_ALIGNMENT, GroupRange, chunk_ranges
from headrace.testing.rule_contract import StorageMeter
from headrace.update import GRADIENT_DTYPES, DeviceUpdater, Updater
from headrace.update.rules.adamw import adamw_planes
from headrace.update.rules.moment_planes import MOMENT_BLOCK_ELEMENTS, MOMENTS
from headrace.update.rules.moments import MOMENT_CODES
from headrace.update.rules.rule import Chunk, noise_key
from headrace.update.rules.tensors import Noise

REDUCED = MOMENTS[1:]
NUM_ELEMENTS = 150 * UNIT_ALIGNMENT
# Borders on multiples of 256, and of nothing more.
GROUPS = (GroupRange(0, 768, 1.0, 0.0), GroupRange(768, 100_096, 1.0, 0.1), GroupRange(100_096, NUM_ELEMENTS, 0.1, 0.01))


def encoded(m, v, moments, key=7):
    """Return the planes of fp32 moments, by the reference."""
    parts = MOMENT_CODES[moments].encode_tensors((as_tensor(m), as_tensor(v)), Noise(key, 0))
    return tuple(
        as_array(part).view(plane.dtype) for part, plane in zip(parts, adamw_planes("float32", moments).states, strict=True)
    )


def decoded(planes):
    code = MOMENT_CODES["int8" if len(planes) == 4 else "bfloat16"]
    return tuple(as_array(moment) for moment in code.decode_tensors([as_tensor(plane) for plane in planes]))


def reduced(num_elements, seed, compute_dtype, moments, make=ordinary):
    """Return planes as `make` has them, with the moments encoded."""
    weight, (*master, m, v) = make(num_elements, seed, compute_dtype)
    return weight, (*master, *encoded(m, v, moments))


def compiled_encode(code):
    """Return the part of a loop that encodes, as a loop of its own."""
    return compiled(code.encode)


def parts_of(states, planes, start, stop):
    return tuple(state[plane.part(start, stop)] for plane, state in zip(planes.states, states, strict=True))


@pairwise(moments=REDUCED, compute_dtype=COMPUTE_DTYPES, gradient_dtype=GRADIENT_DTYPES, make=[ordinary, wild])
def test_bits_of_the_reference(moments, compute_dtype, gradient_dtype, make):
    num_elements, first, unit = 3000, 5 * UNIT_ALIGNMENT, 3
    planes = reduced(num_elements, 1, compute_dtype, moments)
    if make is wild:  # any bits in the states: no moment that occurs, and none that may break the loop
        rng = np.random.default_rng(3)
        tail = tuple(rng.integers(0, 256, state.nbytes, np.uint8).view(state.dtype) for state in planes[1][-4:])
        if moments == "bfloat16":
            tail[-1][:] &= 0x7FFF  # the second moment has no sign
        planes = (wild(num_elements, 1, compute_dtype)[0], planes[1][: -len(tail)] + tail)
    tensors = as_tensor(planes[0].copy(), bfloat16=True), tuple(as_tensor(state.copy()) for state in planes[1])
    rule = adamw(compute_dtype, moments)
    for update in (1, 2, 1000):
        gradient = gradient_of(num_elements, update, gradient_dtype, any_bits=make is wild)
        gradient[::97] = 0
        step = dataclasses.replace(STEP, update=update)
        rule.apply(Chunk(*planes, gradient, unit, first), step, 0.1, 0.5)
        rule.apply_to_tensors(Chunk(*tensors, as_tensor(gradient, bfloat16=True), unit, first), step, 0.1, 0.5)
        assert same_planes(planes, (as_array(tensors[0]), tuple(as_array(state) for state in tensors[1])))


@pytest.mark.parametrize("moments", REDUCED)
def test_the_update_itself_is_exact(moments):
    """What is rounded is what is kept: from equal moments one step gives the weights of fp32 moments, bit for bit."""
    weight, (lo, *kept) = reduced(4096, 2, "bfloat16", moments)
    exact = weight.copy(), (lo.copy(), *decoded(kept))
    gradient = gradient_of(4096, 2, "uint16")
    adamw("bfloat16").apply(Chunk(*exact, gradient), STEP, 0.1, 1.0)
    adamw("bfloat16", moments).apply(Chunk(weight, (lo, *kept), gradient), STEP, 0.1, 1.0)
    assert same_bits(weight, exact[0])
    assert same_bits(lo, exact[1][0])


@pytest.mark.parametrize("moments", REDUCED)
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_and_chunks_do_not_change_a_bit(moments, threads):
    planes, gradient = adamw_planes("bfloat16", moments), gradient_of(NUM_ELEMENTS, 0, "uint16")
    expected = reduced(NUM_ELEMENTS, 0, "bfloat16", moments)
    for group in GROUPS:
        part = slice(group.start, group.stop)
        states = parts_of(expected[1], planes, group.start, group.stop)
        scalars = (group.weight_decay, group.learning_rate_scale)
        adamw("bfloat16", moments).apply(Chunk(expected[0][part], states, gradient[part], 4, group.start), STEP, *scalars)
    with Updater(adamw("bfloat16", moments), threads) as updater:
        for chunk_elements in (NUM_ELEMENTS, 37 * UNIT_ALIGNMENT, UNIT_ALIGNMENT):
            weight, states = reduced(NUM_ELEMENTS, 0, "bfloat16", moments)
            for start, stop in chunk_ranges(NUM_ELEMENTS, chunk_elements):
                parts = parts_of(states, planes, start, stop)
                updater.update_range(Chunk(weight[start:stop], parts, gradient[start:stop], 4, start), STEP, GROUPS)
            assert same_planes((weight, states), expected)


def on_device_planes(planes, device):
    return as_tensor(planes[0], bfloat16=True).to(device), tuple(as_tensor(state).to(device) for state in planes[1])


def check_device(moments, compute_dtype, device):
    num_elements = 20 * UNIT_ALIGNMENT
    groups = (GroupRange(0, 4352, 1.0, 0.0), GroupRange(4352, num_elements, 0.5, 0.1))
    planes, gradient = reduced(num_elements, 0, compute_dtype, moments), gradient_of(num_elements, 0, "uint16")
    weight, states = on_device_planes(planes, device)
    tensor = as_tensor(gradient, bfloat16=True).to(device)
    updater = DeviceUpdater(adamw(compute_dtype, moments), piece_elements=999)
    with StorageMeter([weight, *states, tensor]) as meter:
        updater.update_range(Chunk(weight, states, tensor, 2), STEP, groups)
    assert meter.peak_bytes <= updater.temporary_bytes
    with Updater(adamw(compute_dtype, moments), 2) as cpu:
        cpu.update_range(Chunk(*planes, gradient, 2), STEP, groups)
    assert same_planes(planes, (as_array(weight.cpu()), tuple(as_array(state.cpu()) for state in states)))


@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("moments", REDUCED)
def test_the_rule_on_tensors_has_the_same_bits_in_bounded_memory(moments, compute_dtype):
    check_device(moments, compute_dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("moments", REDUCED)
def test_the_rule_on_a_gpu_has_the_same_bits(moments, compute_dtype):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    check_device(moments, compute_dtype, "cuda")


@pytest.mark.parametrize("moments", REDUCED)
def test_what_was_never_touched_stays_all_zero_bytes(moments):
    """The store knows zero without writing it, so zero moments must be zero bytes, before and after an update."""
    weight, states = reduced(4096, 0, "float32", moments)
    for state in states:
        state[...] = 0
    gradient = gradient_of(4096, 0, "float32")
    gradient[1024:2048] = 0
    assert all((moment == 0).all() for moment in decoded(states))
    adamw("float32", moments).apply(Chunk(weight, states, gradient), STEP, 0.0, 1.0)
    for part in parts_of(states, adamw_planes("float32", moments), 1024, 2048):
        assert not part.view(np.uint8).any()
    assert all(part.view(np.uint8).any() for part in parts_of(states, adamw_planes("float32", moments), 0, 1024))


@pytest.mark.parametrize("moments", REDUCED)
def test_rounding_has_no_bias(moments):
    """The mean over many keys is the moment that was rounded, within five of its standard errors."""
    rng = np.random.default_rng(5)
    m = (rng.standard_normal(1024) * np.exp(rng.standard_normal(1024))).astype(np.float32)
    v = (np.exp(3 * rng.standard_normal(1024)) * 1e-6).astype(np.float32)
    samples = [decoded(encoded(m, v, moments, noise_key(step, 0))) for step in range(400)]
    for index, exact in ((0, m), (1, v)):
        drawn = np.stack([sample[index] for sample in samples]).astype(np.float64)
        # The smallest code of a second moment is never rounded to zero: those below it are too large, by design.
        free = exact > exact.reshape(4, -1).max(axis=1).repeat(256) * 1e-8 if index else np.ones(1024, bool)
        error = drawn.mean(axis=0) - exact
        spread = drawn.std(axis=0) / 20 + 1e-6 * np.abs(exact)
        # A deviate beyond five of them has a chance of one in two million; rare roundings are further from normal.
        assert (np.abs(error) < 5 * spread + np.abs(exact) * 2e-3)[free].mean() > 0.998
        # All deviates together: their mean is within a few of its own standard errors of zero. Without those of moments so near
        # to a code that in so few drawings none went the other way.
        free &= drawn.std(axis=0) > 5e-4 * np.abs(exact)
        assert free.sum() > 800
        assert abs((error / spread)[free].mean()) < 5 / np.sqrt(free.sum())


@pytest.mark.parametrize("moments", REDUCED)
def test_second_moments_fall_although_a_step_changes_less_than_a_place(moments):
    """With beta2 = 0.999 and no gradient `v` halves in 693 steps. Rounded to nearest, bfloat16 would never fall."""
    weight, states = reduced(2048, 0, "float32", moments)
    states = encoded(np.zeros(2048, np.float32), np.linspace(0.3, 1.0, 2048, dtype=np.float32) * 1e-6, moments)
    before = decoded(states)[1]
    gradient = np.zeros(2048, np.float32)
    # One element of each block keeps its gradient, so that the scale of the block does not fall with the rest.
    gradient[::256] = 1e-3
    rule = adamw("float32", moments, beta2=0.999)
    for update in range(1, 694):
        step = dataclasses.replace(STEP, learning_rate=0.0, update=update, gradient_scale=1.0)
        rule.apply(Chunk(weight, states, gradient), step, 0.0, 1.0)
    fell = (decoded(states)[1] / before)[np.arange(2048) % 256 != 0]
    assert fell.mean() == pytest.approx(0.5, rel=0.03)
    assert 0.05 < fell.min() <= fell.max() < 1.0
    nearest = as_tensor(before).to(torch.bfloat16)
    assert torch.equal((nearest.float() * 0.999).to(torch.bfloat16), nearest)


def dynamic_map(signed):
    """Return the codes of Dettmers et al. 2022, figure 2: a sign, a count of zeros for the exponent, a linear fraction."""
    bits, values = 7 if signed else 8, [0.0, 1.0]
    for exponent in range(bits):
        edges = np.linspace(0.1, 1.0, 2 ** (bits - 1 - exponent) + 1)
        values += list((edges[:-1] + edges[1:]) / 2 * 10.0**-exponent)
    values = sorted(values)[: 2**bits]
    return np.array(sorted({-value for value in values} | set(values)) if signed else values)


def nearest(values, codes):
    edges = (codes[1:] + codes[:-1]) / 2
    return codes[np.searchsorted(edges, values)]


def test_the_code_errs_less_than_the_dynamic_map():
    """Adam's step from kept moments against the step from exact ones, both rounded to nearest, in root-mean-square.

    Moments as in training: columns of a matrix have scales of their own (here over two decades), and a first moment is a
    normal share of the root of its second.
    """
    rng = np.random.default_rng(6)
    scale = np.exp(rng.uniform(np.log(1e-6), np.log(1e-4), 256))
    root = scale * np.sqrt(rng.chisquare(10, (200, 256)) / 10)
    m = scale * rng.standard_normal((200, 256)) * 0.3
    largest_m, largest_root = np.abs(m).max(axis=1, keepdims=True), root.max(axis=1, keepdims=True)

    def error(kept_m, kept_root):
        return np.sqrt(np.mean((kept_m / kept_root - m / root) ** 2) / np.mean((m / root) ** 2))

    codes = np.arange(256.0)
    squares = (codes / 255) ** 2
    signed = np.concatenate([-((codes[127:0:-1] / 127) ** 2), (codes[:128] / 127) ** 2])
    ours = error(nearest(m / largest_m, signed) * largest_m, nearest(root / largest_root, squares) * largest_root)
    kept_v = nearest((root / largest_root) ** 2, dynamic_map(False)) * largest_root**2
    theirs = error(nearest(m / largest_m, dynamic_map(True)) * largest_m, np.sqrt(kept_v))
    linear = error(
        nearest(m / largest_m, np.arange(-127, 128) / 127.0) * largest_m,
        nearest(root / largest_root, np.maximum(codes, 1) / 255) * largest_root,
    )
    assert ours < 0.9 * theirs
    assert ours < 0.5 * linear
    # And as it is done, at random: less than 6 % of a step, against 100 % that a minibatch's own noise makes of it.
    kept = decoded(encoded(m.astype(np.float32).ravel(), (root**2).astype(np.float32).ravel(), "int8"))
    assert error(kept[0].reshape(m.shape), np.sqrt(kept[1].reshape(m.shape))) < 0.06


def test_a_second_moment_above_zero_stays_above_zero():
    """Else its first moment would be divided by epsilon alone: a step a thousand times too long."""
    v = np.full(256, 1e-20, np.float32)
    v[0] = 1.0
    assert (decoded(encoded(np.zeros(256, np.float32), v, "int8"))[1] > 0).all()


def test_a_block_that_is_not_finite_decodes_to_nan_and_leaves_the_others_alone():
    for bad in (np.nan, np.inf):
        m = np.ones(512, np.float32)
        m[3] = bad
        kept_m, kept_v = decoded(encoded(m, np.ones(512, np.float32), "int8"))
        assert np.isnan(kept_m[:256]).all()
        assert np.isnan(kept_v[:256]).all()
        assert kept_m[256:] == pytest.approx(1.0)


def test_the_random_bits_are_the_published_hash_of_key_and_element():
    """`lowbias32`, written down again in Python's integers; and no bit of it prefers a side."""

    def lowbias32(x):
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    # A bfloat16 number with nothing below its last place but the random bits: what is added can be read off.
    key, first = noise_key(17, 3), 2**32 - 100
    bits = np.array([lowbias32((first + index) % 2**32 ^ key) for index in range(4096)], np.uint32)
    values = (np.uint32(0x3F800000) + (np.uint32(0x10000) - (bits >> np.uint32(16)))).view(np.float32)
    zeros, m, v = np.zeros(4096, np.float32), np.zeros(4096, np.uint16), np.zeros(4096, np.uint16)
    encode = compiled_encode(MOMENT_CODES["bfloat16"])
    encode((values, zeros), (m, v), 0, 4096, first, np.uint32(key))
    assert (m == 0x3F81).all()  # just enough to reach the next number
    values = (values.view(np.uint32) - np.uint32(1)).view(np.float32)
    encode((values, zeros), (m, v), 0, 4096, first, np.uint32(key))
    assert (m == 0x3F80).all()
    ones = (bits[:, None] >> np.arange(32, dtype=np.uint32) & 1).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 0.04


def test_steps_and_units_round_differently():
    m, v = np.full(1024, 0.3, np.float32), np.full(1024, 0.3, np.float32)
    planes = [encoded(m, v, "bfloat16", noise_key(step, unit))[0] for step, unit in ((1, 0), (2, 0), (1, 1))]
    assert not any(same_bits(planes[a], planes[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_ranges_and_groups_that_cut_a_block_are_refused_untouched():
    planes, gradient = reduced(1024, 0, "float32", "int8"), gradient_of(1024, 0, "float32")
    before = copied(planes)
    groups = (GroupRange(0, 160, 1.0, 0.0), GroupRange(160, 1024, 1.0, 0.1))
    with Updater(adamw("float32", "int8"), 1) as updater, pytest.raises(ConfigError, match="begins at element 160"):
        updater.update_range(Chunk(*planes, gradient), STEP, groups)
    with pytest.raises(ConfigError, match="blocks of 256 elements"):
        adamw("float32", "int8").apply(Chunk(*planes, gradient, 0, 32), STEP, 0.0, 1.0)
    tensors = on_device_planes(planes, "cpu")
    with pytest.raises(ConfigError, match="begins at element 160"):
        DeviceUpdater(adamw("float32", "int8")).update_range(Chunk(*tensors, as_tensor(gradient)), STEP, groups)
    assert same_planes(planes, before)
    assert MOMENT_BLOCK_ELEMENTS == 256


def test_moments_that_are_not_known_are_refused():
    with pytest.raises(ConfigError, match="moments: expected float32, bfloat16 or int8, found 'int4'"):
        adamw("bfloat16", "int4")
