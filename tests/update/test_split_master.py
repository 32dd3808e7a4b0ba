"""The split master is exact, its upper half is the rounding it claims to be, and the edges are as documented."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from update_planes import EDGES, as_tensor

from headrace.terms.errors import ConfigError
from headrace.update import join_master, round_to_bfloat16, split_master, tensors, widen_bfloat16

words = arrays.arrays(np.uint32, st.integers(0, 300), elements=st.integers(0, (1 << 32) - 1))


def check_split(master):
    hi, lo = split_master(master)
    bits, number = master.view(np.uint32), ~np.isnan(master)
    joined = join_master(hi, lo).view(np.uint32)
    assert np.array_equal(joined[number], bits[number])
    assert (joined[~number] == 0x7FC00000).all()
    # The contract in integers, apart from the implementation: 64 bits wide, so that nothing wraps.
    assert np.array_equal(hi[number].astype(np.int64) * 65536 + lo[number], bits[number].astype(np.int64))
    assert np.array_equal(hi[number].astype(np.int64), (bits[number].astype(np.int64) + 0x8000) // 65536)


@settings(max_examples=200, deadline=None)
@given(words)
def test_exact_for_any_bit_pattern(bits):
    check_split(bits.view(np.float32))


def test_exact_around_every_upper_half():
    """All 2^16 upper halves, with the lower halves where the rounding changes."""
    high = np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    check_split((high | low).reshape(-1).view(np.float32))


def test_edges():
    check_split(EDGES)
    largest = np.array([0x7F7F7FFF, 0x7F7F8000, 0xFF7FFFFF, 0x7F800000], np.uint32).view(np.float32)
    hi, lo = split_master(largest)
    assert hi.tolist() == [0x7F7F, 0x7F80, 0xFF80, 0x7F80]  # beyond the middle: infinity to compute, not to the master
    assert lo.tolist() == [0x7FFF, -0x8000, -1, 0]
    assert np.array_equal(join_master(hi, lo), largest)
    assert np.isfinite(join_master(hi, lo)).tolist() == [True, True, True, False]


def test_upper_half_is_the_nearest_bfloat16_and_ties_go_away_from_zero():
    values = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0x3F807FFF, 0x3F808001], np.uint32).view(np.float32)
    assert split_master(values)[0].tolist() == [0x3F81, 0x3F82, 0xBF81, 0x3F80, 0x3F81]
    rng = np.random.default_rng(0)
    values = rng.standard_normal(10_000, np.float32)
    values = values[values.view(np.uint32) & 0xFFFF != 0x8000]
    assert np.array_equal(split_master(values)[0], round_to_bfloat16(values))


def test_reference_splits_and_joins_alike():
    bits = np.random.default_rng(1).integers(0, 1 << 32, 1 << 16, np.uint32)
    master = np.concatenate([bits.view(np.float32), EDGES])
    hi, lo = split_master(master)
    reference_hi, reference_lo = tensors.split(as_tensor(master))
    assert np.array_equal(reference_hi.numpy().view(np.uint16), hi)
    assert np.array_equal(reference_lo.numpy(), lo)
    joined = tensors.join(as_tensor(hi, bfloat16=True), as_tensor(lo))
    assert np.array_equal(joined.numpy().view(np.uint32), join_master(hi, lo).view(np.uint32))


def test_a_bfloat16_checkpoint_is_its_own_upper_half():
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = widen_bfloat16(bits)
    hi, lo = split_master(values)
    number = ~np.isnan(values)
    assert np.array_equal(hi[number], bits[number])
    assert (lo == 0).all()


@settings(max_examples=100, deadline=None)
@given(words)
def test_rounding_and_widening_are_those_of_torch(bits):
    values = bits.view(np.float32)
    rounded = torch.from_numpy(values.copy()).to(torch.bfloat16)
    ours = as_tensor(round_to_bfloat16(values), bfloat16=True)
    assert torch.equal(ours.isnan(), rounded.isnan())
    number = ~ours.isnan()
    assert torch.equal(ours[number].view(torch.int16), rounded[number].view(torch.int16))
    widened = widen_bfloat16(round_to_bfloat16(values))
    assert np.array_equal(widened, rounded.to(torch.float32).numpy(), equal_nan=True)


def test_writes_into_what_it_is_given_and_keeps_shapes():
    master = np.random.default_rng(2).standard_normal((3, 5)).astype(np.float32)
    hi, lo, out = np.empty((3, 5), np.uint16), np.empty((3, 5), np.int16), np.empty((3, 5), np.float32)
    given_hi, given_lo = split_master(master, hi=hi, lo=lo)
    assert given_hi is hi
    assert given_lo is lo
    assert join_master(hi, lo, out=out) is out
    assert np.array_equal(out, master)
    bits = np.empty((3, 5), np.uint16)
    assert round_to_bfloat16(master, out=bits) is bits
    assert widen_bfloat16(bits, out=out) is out


def test_a_read_only_source_will_do():
    master = np.ones(16, np.float32)
    master.flags.writeable = False
    assert split_master(master)[0].tolist() == [0x3F80] * 16


@pytest.mark.parametrize(
    "call",
    [
        lambda: split_master(np.zeros(4, np.float64)),
        lambda: split_master(np.zeros(4, np.float32), lo=np.zeros(5, np.int16)),
        lambda: split_master(np.zeros(8, np.float32)[::2]),
        lambda: join_master(np.zeros(4, np.uint16), np.zeros(4, np.uint16)),
        lambda: join_master(np.zeros(4, np.uint16), np.zeros(3, np.int16)),
        lambda: widen_bfloat16(np.zeros(4, np.int16)),
        lambda: round_to_bfloat16(np.zeros(4, np.float32), out=np.zeros((2, 2), np.uint16)),
    ],
)
def test_arrays_that_do_not_fit_are_refused(call):
    with pytest.raises(ConfigError, match=r"must be a contiguous array .*found"):
        call()
