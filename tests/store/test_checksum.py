"""The checksum sees what it must see, and the kernel is the reference. Run: pytest tests/store/test_checksum.py"""

import sys
import threading

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from headrace.store import checksum_reference
from headrace.store.checksum import checksum

PATIENCE = 4000

words = arrays(np.uint64, st.integers(1, 200), elements=st.integers(0, 2**64 - 1))


@settings(deadline=None)
@given(words)
def test_the_kernel_equals_the_reference(data: np.ndarray) -> None:
    assert checksum(data) == checksum_reference(data)


def test_the_kernel_equals_the_reference_on_a_megabyte_and_on_nothing() -> None:
    data = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    assert checksum(data) == checksum_reference(data)
    assert checksum(data[:0]) == checksum_reference(data[:0]) == 0


@settings(deadline=None)
@given(words, st.data())
def test_any_change_of_one_word_is_seen(data: np.ndarray, draw: st.DataObject) -> None:
    index = draw.draw(st.integers(0, data.size - 1))
    change = draw.draw(st.integers(1, 2**64 - 1))
    changed = data.copy()
    changed[index] ^= np.uint64(change)
    assert checksum(changed) != checksum(data)


@settings(deadline=None)
@given(words, st.data())
def test_two_words_that_changed_places_are_seen(data: np.ndarray, draw: st.DataObject) -> None:
    one, other = draw.draw(st.integers(0, data.size - 1)), draw.draw(st.integers(0, data.size - 1))
    swapped = data.copy()
    swapped[[one, other]] = data[[other, one]]
    assert (checksum(swapped) != checksum(data)) == (data[one] != data[other])


def test_signs_that_changed_places_are_seen() -> None:
    # Words that differ in their top bit only: a plain weighted sum with odd weights cannot see these.
    data = np.array([5, 5 + 2**63, 7, 7], dtype=np.uint64)
    assert checksum(data) != checksum(data[[1, 0, 2, 3]])
    both = 2**63 + 2**31
    data = np.array([5, 5 + both, 7, 7], dtype=np.uint64)
    assert checksum(data) != checksum(data[[1, 0, 2, 3]])


def test_a_lost_or_moved_page_is_seen() -> None:
    data = np.random.default_rng(1).integers(0, 256, 1 << 16, dtype=np.uint8)
    lost, moved = data.copy(), np.roll(data, 4096)
    lost[4096:8192] = 0
    assert len({checksum(data), checksum(lost), checksum(moved)}) == 3


def test_other_threads_run_python_during_a_checksum() -> None:
    data = np.zeros(8 << 20, dtype=np.uint8)
    checksum(data)
    started, stop, turns = threading.Event(), threading.Event(), 0

    def work() -> None:
        nonlocal turns
        started.set()
        while not stop.is_set() and turns < PATIENCE:
            checksum(data)
            turns += 1

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=work)
    try:
        # From here on a thread gets the interpreter only when another gives it up by itself.
        sys.setswitchinterval(1000)
        thread.start()
        started.wait()
        stop.set()
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    assert turns < PATIENCE
