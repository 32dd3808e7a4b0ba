"""The split master is exact, its upper half is the rounding it claims to be, and the edges are as documented.

The compiled loops have the bits of `tensors` for any planes: `test_adamw_rule.py`, and the contract of each rule.
"""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from update_planes import EDGES, as_tensor

from headrace.update.rules import tensors

words = arrays.arrays(np.uint32, st.integers(0, 300), elements=st.integers(0, (1 << 32) - 1))


def split(master: NDArray[np.float32]) -> tuple[NDArray[np.uint16], NDArray[np.int16]]:
    hi, lo = tensors.split(as_tensor(master))
    return hi.numpy().view(np.uint16), lo.numpy()


def join(hi: NDArray[np.uint16], lo: NDArray[np.int16]) -> NDArray[np.float32]:
    return tensors.join(as_tensor(hi, bfloat16=True), as_tensor(lo)).numpy()


def check_split(master):
    hi, lo = split(master)
    bits, number = master.view(np.uint32), ~np.isnan(master)
    joined = join(hi, lo).view(np.uint32)
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
    hi, lo = split(largest)
    assert hi.tolist() == [0x7F7F, 0x7F80, 0xFF80, 0x7F80]  # beyond the middle: infinity to compute, not to the master
    assert lo.tolist() == [0x7FFF, -0x8000, -1, 0]
    assert np.array_equal(join(hi, lo), largest)
    assert np.isfinite(join(hi, lo)).tolist() == [True, True, True, False]


def test_upper_half_is_the_nearest_bfloat16_and_ties_go_away_from_zero():
    values = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0x3F807FFF, 0x3F808001], np.uint32).view(np.float32)
    assert split(values)[0].tolist() == [0x3F81, 0x3F82, 0xBF81, 0x3F80, 0x3F81]
    rng = np.random.default_rng(0)
    values = rng.standard_normal(10_000, np.float32)
    values = values[values.view(np.uint32) & 0xFFFF != 0x8000]
    nearest = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(split(values)[0], nearest)


def test_a_bfloat16_checkpoint_is_its_own_upper_half():
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = as_tensor(bits, bfloat16=True).to(torch.float32).numpy()
    hi, lo = split(values)
    number = ~np.isnan(values)
    assert np.array_equal(hi[number], bits[number])
    assert (lo == 0).all()
