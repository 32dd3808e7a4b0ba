"""Threads, chunks and group borders leave no trace in the bits."""

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from update_planes import COMPUTE_DTYPES, STEP, adamw, copied, gradient_of, ordinary, same_planes

from headrace.terms.errors import ConfigError
from headrace.terms.layout import UNIT_ALIGNMENT, GroupRange, chunk_ranges
from headrace.update import GRADIENT_DTYPES, Updater, group_pieces
from headrace.update.rules.adamw import adamw_planes
from headrace.update.rules.rule import Chunk

# Long enough for shares of more than one thread; the borders of the groups lie on no multiple of anything but 32.
NUM_ELEMENTS = 200 * UNIT_ALIGNMENT
GROUPS = (GroupRange(0, 160, 1.0, 0.0), GroupRange(160, 300_000 + 32, 1.0, 0.1), GroupRange(300_032, NUM_ELEMENTS, 0.1, 0.01))


def expected_planes(compute_dtype, gradient):
    """The rule applied group by group, in one thread."""
    planes = ordinary(NUM_ELEMENTS, 0, compute_dtype)
    for group in GROUPS:
        part = slice(group.start, group.stop)
        states = tuple(state[part] for state in planes[1])
        adamw(compute_dtype).apply(
            Chunk(planes[0][part], states, gradient[part]), STEP, group.weight_decay, group.learning_rate_scale
        )
    return planes


@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_and_chunks_do_not_change_a_bit(compute_dtype, threads):
    gradient = gradient_of(NUM_ELEMENTS, 0, "uint16")
    expected = expected_planes(compute_dtype, gradient)
    with Updater(adamw(compute_dtype), threads) as updater:
        for chunk_elements in (NUM_ELEMENTS, 37 * UNIT_ALIGNMENT, UNIT_ALIGNMENT):
            weight, states = ordinary(NUM_ELEMENTS, 0, compute_dtype)
            for start, stop in chunk_ranges(NUM_ELEMENTS, chunk_elements):
                part = slice(start, stop)
                parts = tuple(state[part] for state in states)
                updater.update_range(Chunk(weight[part], parts, gradient[part], 0, start), STEP, GROUPS)
            assert same_planes((weight, states), expected)


@settings(max_examples=30, deadline=None)
@given(cuts=st.sets(st.integers(1, 4095), max_size=6), borders=st.sets(st.integers(1, 4095), max_size=4))
def test_any_cut_and_any_groups(cuts, borders):
    edges = [0, *sorted(borders), 4096]
    groups = [GroupRange(a, b, 1.0 / (1 + i), 0.1 * i) for i, (a, b) in enumerate(itertools.pairwise(edges))]
    gradient = gradient_of(4096, 1, "float32")
    whole, pieces = ordinary(4096, 1, "bfloat16"), ordinary(4096, 1, "bfloat16")
    with Updater(adamw("bfloat16"), 2) as updater:
        updater.update_range(Chunk(*whole, gradient), STEP, groups)
        for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), 4096], strict=True):
            parts = tuple(state[start:stop] for state in pieces[1])
            updater.update_range(Chunk(pieces[0][start:stop], parts, gradient[start:stop], 0, start), STEP, groups[::-1])
    assert same_planes(whole, pieces)


def test_calls_from_several_threads_share_the_workers():
    gradient = gradient_of(NUM_ELEMENTS, 0, "uint16")
    expected = expected_planes("bfloat16", gradient)
    weight, states = ordinary(NUM_ELEMENTS, 0, "bfloat16")
    with Updater(adamw("bfloat16"), 2) as updater:

        def update(start, stop):
            part = slice(start, stop)
            parts = tuple(state[part] for state in states)
            updater.update_range(Chunk(weight[part], parts, gradient[part], 0, start), STEP, GROUPS)

        callers = [threading.Thread(target=update, args=chunk) for chunk in chunk_ranges(NUM_ELEMENTS, 20 * UNIT_ALIGNMENT)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert same_planes((weight, states), expected)


class RecordingRule:
    """A rule that only writes down which elements it was given, and may fail at some."""

    planes = adamw_planes("float32")
    sums = False

    def __init__(self, *, fail_at=None):
        self.fail_at = fail_at
        self.lock = threading.Lock()
        self.calls = []
        self.active = 0

    def apply(self, chunk, step, weight_decay, learning_rate_scale, summing=None):
        weight = chunk.weight
        with self.lock:
            self.active += 1
            self.calls.append((int(weight[0]), int(weight[-1]) + 1, threading.current_thread().name, weight_decay))
        try:
            if self.fail_at is not None and weight[0] <= self.fail_at <= weight[-1]:
                raise ArithmeticError(f"element {self.fail_at}")
        finally:
            with self.lock:
                self.active -= 1


def run_recorded(rule, threads):
    numbers = np.arange(NUM_ELEMENTS, dtype=np.float32)
    with Updater(rule, threads) as updater:
        updater.update_range(Chunk(numbers, (numbers, numbers), numbers), STEP, GROUPS)


@pytest.mark.parametrize("threads", [1, 3])
def test_each_element_once_in_aligned_shares_on_so_many_threads(threads):
    rule = RecordingRule()
    run_recorded(rule, threads)
    calls = sorted(rule.calls)
    assert [stop for _, stop, _, _ in calls] == [start for start, _, _, _ in calls[1:]] + [NUM_ELEMENTS]
    borders = {group.start for group in GROUPS}
    assert all(start % UNIT_ALIGNMENT == 0 or start in borders for start, _, _, _ in calls)
    names = {name for _, _, name, _ in calls}
    assert len(names) <= threads
    assert all(name == threading.current_thread().name or name.startswith("headrace-update") for name in names)
    assert {decay for _, _, _, decay in calls} == {0.0, 0.1, 0.01}


def test_an_error_in_one_share_comes_out_after_all_threads_have_stopped():
    rule = RecordingRule(fail_at=310_000)
    with pytest.raises(ArithmeticError, match="element 310000"):
        run_recorded(rule, 3)
    assert rule.active == 0


@pytest.mark.wide
@pytest.mark.parametrize("dtype", GRADIENT_DTYPES)
def test_warm_up_compiles_the_gradient_type_of_the_run_and_no_other(dtype):
    class Counting(RecordingRule):
        def apply(self, chunk, *rest):
            self.calls.append(chunk.gradient.dtype.name)

    rule = Counting()
    with Updater(rule, 1) as updater:
        updater.warm_up(dtype)
    assert rule.calls == [dtype]
    with Updater(adamw("bfloat16"), 1) as updater:
        updater.warm_up(dtype)


@pytest.mark.parametrize(
    "groups",
    [
        (),
        (GroupRange(0, 64, 1.0, 0.0),),
        (GroupRange(0, 64, 1.0, 0.0), GroupRange(96, 128, 1.0, 0.1)),
        (GroupRange(0, 96, 1.0, 0.0), GroupRange(64, 128, 1.0, 0.1)),
        (GroupRange(32, 128, 1.0, 0.0),),
    ],
)
def test_groups_that_leave_gaps_or_overlap_are_refused_untouched(groups):
    planes, gradient = ordinary(128, 0, "float32"), gradient_of(128, 0, "float32")
    before = copied(planes)
    with Updater(adamw("float32"), 1) as updater, pytest.raises(ConfigError, match="without gap or overlap"):
        updater.update_range(Chunk(*planes, gradient), STEP, groups)
    assert same_planes(planes, before)


def test_groups_outside_the_range_do_not_matter():
    groups = (GroupRange(0, 64, 1.0, 0.0), GroupRange(64, 128, 1.0, 0.1), GroupRange(500, 600, 1.0, 0.2))
    assert group_pieces(groups, 32, 100) == [GroupRange(32, 64, 1.0, 0.0), GroupRange(64, 100, 1.0, 0.1)]
    assert group_pieces(groups, 64, 64) == []


def test_wrong_lengths_and_thread_counts_are_refused():
    planes, gradient = ordinary(128, 0, "float32"), gradient_of(128, 0, "float32")
    groups = (GroupRange(0, 256, 1.0, 0.0),)
    with Updater(adamw("float32"), 1) as updater:
        with pytest.raises(ConfigError, match=r"gradient must have shape \(128,\), found \(64,\)"):
            updater.update_range(Chunk(*planes, gradient[:64]), STEP, groups)
        with pytest.raises(ConfigError, match="state 1"):
            updater.update_range(Chunk(planes[0], (planes[1][0], planes[1][1][:9]), gradient), STEP, groups)
    with pytest.raises(ConfigError, match="expected at least 1, found 0"):
        Updater(adamw("float32"), 0)


def test_close_ends_the_threads_and_may_be_repeated():
    updater = Updater(RecordingRule(), 2)
    before = set(threading.enumerate())
    numbers = np.zeros(NUM_ELEMENTS, np.float32)
    updater.update_range(Chunk(numbers, (numbers, numbers), numbers), STEP, GROUPS)
    started = set(threading.enumerate()) - before
    assert started
    updater.close()
    updater.close()
    assert not any(thread.is_alive() for thread in started)
