"""Checksums taken along with the update are those of the bytes that it leaves."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import sampled
from update_planes import COMPUTE_DTYPES, STEP, adamw, gradient_of, ordinary, same_planes

from headrace.machine.jit import compiled
from headrace.store import checksum_reference
from headrace.store.checksum import add_words
from headrace.terms.errors import ConfigError
from headrace.terms.layout import UNIT_ALIGNMENT, GroupRange
from headrace.update import GRADIENT_DTYPES, Summing, Updater
from headrace.update.rules.adamw import adamw_planes
from headrace.update.rules.loops import SUMMED_ELEMENTS
from headrace.update.rules.rule import Chunk

sum_words = compiled(add_words)  # as a loop of its own


def as_written(planes, weight, states):
    """Return the bytes of a chunk's weights and of its states, back to back."""
    size = weight.size
    content = np.zeros(planes.state_bytes(size), np.uint8)
    for (_, place), state in zip(planes.split_states(size), states, strict=True):
        content[place] = state.view(np.uint8)
    return weight, content


@pytest.mark.wide
@pytest.mark.parametrize("gradient_dtype", GRADIENT_DTYPES)
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_they_are_those_of_the_bytes_that_are_left(compute_dtype, gradient_dtype, threads):
    size = 3 * SUMMED_ELEMENTS + 5 * UNIT_ALIGNMENT  # tiles, and a rest; shares of several threads
    groups = (GroupRange(0, 160, 1.0, 0.0), GroupRange(160, 70_016, 1.0, 0.1), GroupRange(70_016, size, 0.1, 0.01))
    gradient = gradient_of(size, 3, gradient_dtype)
    (weight, states), expected = ordinary(size, 3, compute_dtype), ordinary(size, 3, compute_dtype)
    rule = adamw(compute_dtype)
    with Updater(rule, threads) as updater:
        found = updater.update_range(Chunk(weight, states, gradient), STEP, groups, take_checksums=True)
        assert updater.update_range(Chunk(*expected, gradient), STEP, groups) is None
    assert same_planes((weight, states), expected)
    weights, content = as_written(rule.planes, weight, states)
    assert found == (checksum_reference(weights), checksum_reference(content))


@pytest.mark.wide
@settings(max_examples=25, deadline=None)
@given(
    pages=st.integers(1, 40),
    borders=st.sets(st.integers(1, 2559), max_size=5),
    compute_dtype=st.sampled_from(COMPUTE_DTYPES),
    seed=st.integers(0, 9),
)
def test_any_size_and_any_groups(pages, borders, compute_dtype, seed):
    size = pages * UNIT_ALIGNMENT
    edges = [0, *sorted(32 * border for border in borders if 32 * border < size), size]
    groups = [GroupRange(a, b, 1.0, 0.1) for a, b in itertools.pairwise(edges)]
    weight, states = ordinary(size, seed, compute_dtype)
    rule = adamw(compute_dtype)
    with Updater(rule, 2) as updater:
        found = updater.update_range(
            Chunk(weight, states, gradient_of(size, seed, "uint16")), STEP, groups, take_checksums=True
        )
    weights, content = as_written(rule.planes, weight, states)
    assert found == (checksum_reference(weights), checksum_reference(content))


@pytest.mark.parametrize("moments", sampled(["bfloat16", "int8"]))
def test_moments_of_fewer_bits_leave_them_to_the_store(moments):
    size, planes = UNIT_ALIGNMENT, adamw_planes("bfloat16", moments)
    weight = np.zeros(size, np.uint16)
    states = tuple(np.zeros(plane.num_values(size), plane.dtype) for plane in planes.states)
    rule = adamw("bfloat16", moments)
    gradient, groups = np.zeros(size, np.uint16), (GroupRange(0, size, 1.0, 0.0),)
    with Updater(rule, 1) as updater:
        assert updater.update_range(Chunk(weight, states, gradient), STEP, groups, take_checksums=True) is None
    with pytest.raises(ConfigError, match="checksums cannot be computed with states"):
        rule.apply(Chunk(weight, states, gradient), STEP, 0.0, 1.0, Summing(np.zeros(6, np.int64), np.zeros(2, np.uint64)))


def test_half_words_are_refused():
    weight, states = ordinary(2, 0, "bfloat16")
    summing = Summing(np.zeros(4, np.int64), np.zeros(2, np.uint64))
    with pytest.raises(ConfigError, match="whole words of 8 bytes, found 2 elements"):
        adamw("bfloat16").apply(Chunk(weight, states, np.zeros(2, np.uint16)), STEP, 0.0, 1.0, summing)


@given(values=st.lists(st.integers(0, 2**64 - 1), max_size=70), cut=st.integers(0, 70))
def test_parts_of_a_buffer_add_up_to_its_checksum(values, cut):
    words = np.array(values, np.uint64)
    cut = min(cut, words.size)
    first = sum_words(words[:cut], 0, np.uint64(0))
    assert int(sum_words(words[cut:], cut, np.uint64(first))) == checksum_reference(words)
