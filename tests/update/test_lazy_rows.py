"""Rows that catch up when they are read: the bits of dense updates of the whole table."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from update_planes import COMPUTE_DTYPES, adamw, copied, ordinary, same_planes

from headrace.terms.errors import ConfigError
from headrace.update import StepScalars
from headrace.update.rules.adafactor import Adafactor
from headrace.update.rules.lion import Lion
from headrace.update.rules.rule import Chunk
from headrace.update.rules.sgd import SGD
from headrace.update.rules.table import rule_of
from headrace.update.tables.lazy_rows import AppliedUpdates, LazyRows, StateRows

WIDTH = 24


class Table:
    """A table twice: updated whole, and by the rows that a step touches."""

    def __init__(self, num_rows, rule, weight_decay, *, planes):
        self.rule, self.weight_decay = rule, weight_decay
        self.num_rows, self.dense, self.sparse = num_rows, planes, copied(planes)
        self.seen, self.applied = np.zeros(num_rows, np.int64), AppliedUpdates()
        self.lazy = LazyRows(rule, weight_decay, 0.5)

    def gathered(self, ids):
        weight, *states = (plane.reshape(self.num_rows, -1)[ids] for plane in (self.sparse[0], *self.sparse[1]))
        return StateRows(weight, tuple(states), self.seen[ids])

    def write(self, ids, rows):
        for plane, new in zip((self.sparse[0], *self.sparse[1]), (rows.weight, *rows.states), strict=True):
            plane.reshape(self.num_rows, -1)[ids] = new
        self.seen[ids] = rows.seen

    def step(self, ids, gradient, learning_rate, scale):
        step = StepScalars(learning_rate=learning_rate, update=self.applied.count + 1, gradient_scale=scale)
        whole = np.zeros((self.num_rows, WIDTH), np.float32)
        whole[ids] = gradient
        self.rule.apply(Chunk(*self.dense, whole.reshape(-1)), step, self.weight_decay, 0.5)
        rows = self.gathered(ids)
        self.lazy.catch_up(rows, self.applied)
        assert same_planes((rows.weight, rows.states), self.before(ids))  # what the forward pass of this step reads
        self.lazy.update(rows, gradient, step)
        self.write(ids, rows)
        self.applied.note(step)
        self.last = copied(self.dense)

    def before(self, ids):
        weight, *states = (plane.reshape(self.num_rows, -1)[ids] for plane in (self.last[0], *self.last[1]))
        return weight, tuple(states)

    def export(self):
        everything = np.arange(self.num_rows)
        rows = self.gathered(everything)
        self.lazy.catch_up(rows, AppliedUpdates(self.applied.learning_rates))
        self.write(everything, rows)


def trained(table, steps, seed, most_rows):
    rng = np.random.default_rng(seed)
    table.last = copied(table.dense)
    for index in range(steps):
        ids = rng.choice(table.num_rows, rng.integers(1, most_rows + 1), replace=False)
        gradient = rng.standard_normal((ids.size, WIDTH), np.float32)
        if rng.random() < 0.1:
            continue  # a skipped step: its gradient was not finite
        norm = float(np.linalg.norm(gradient))
        table.step(ids, gradient, 1e-2 * 0.5 * (1 + math.cos(math.pi * index / steps)), min(1.0, 5.0 / norm) / 8)
    table.export()


def fresh(num_rows, compute_dtype, num_states=2):
    """Return planes as they are at a run's begin: moments are zero."""
    weight, states = ordinary(num_rows * WIDTH, 3, compute_dtype)
    own = states[:-2] + states[-2:][:num_states]
    for state in own[len(states) - 2 :]:
        state[:] = 0
    return weight, own


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_after_120_steps_weights_and_moments_have_the_bits_of_dense_adamw(compute_dtype, weight_decay):
    table = Table(61, adamw(compute_dtype), weight_decay, planes=fresh(61, compute_dtype))
    trained(table, 120, 5, 6)
    assert 100 <= table.applied.count < 120  # some steps were skipped
    assert same_planes(table.dense, table.sparse)
    assert (table.seen == table.applied.count).all()


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 40),
    steps=st.integers(0, 25),
    seed=st.integers(0, 1 << 30),
    beta1=st.sampled_from([0.0, 0.3, 0.9]),
    beta2=st.sampled_from([0.0, 0.95, 0.999]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    begun=st.booleans(),
)
def test_any_rows_in_any_steps_have_the_bits_of_dense_adamw(num_rows, steps, seed, beta1, beta2, weight_decay, begun):
    planes = ordinary(num_rows * WIDTH, seed, "bfloat16") if begun else fresh(num_rows, "bfloat16")
    table = Table(num_rows, adamw("bfloat16", beta1=beta1, beta2=beta2), weight_decay, planes=planes)
    trained(table, steps, seed, num_rows)
    assert same_planes(table.dense, table.sparse)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("optimizer", "num_states"), [(Lion(), 1), (SGD(momentum=0.9), 1), (SGD(momentum=0.0), 0)])
def test_other_rules_of_single_elements_are_replayed_too(optimizer, num_states, weight_decay):
    table = Table(23, rule_of(optimizer, "bfloat16"), weight_decay, planes=fresh(23, "bfloat16", num_states))
    trained(table, 30, 7, 5)
    assert same_planes(table.dense, table.sparse)


def test_a_row_that_stands_still_is_not_computed(monkeypatch):
    table = Table(9, adamw("bfloat16"), 0.0, planes=fresh(9, "bfloat16"))
    table.last = copied(table.dense)
    for _ in range(3):
        table.step(np.array([4]), np.ones((1, WIDTH), np.float32), 1e-3, 1.0)
    sizes = []
    apply = table.rule.apply
    monkeypatch.setattr(table.rule, "apply", lambda chunk, *rest: (sizes.append(chunk.weight.size), apply(chunk, *rest)))
    table.export()
    assert not sizes
    table.applied.note(StepScalars(learning_rate=1e-3, update=4))
    table.export()
    assert sizes == [WIDTH]


def test_rows_from_before_or_after_their_time_are_refused():
    table = Table(5, adamw("float32"), 0.0, planes=fresh(5, "float32"))
    rows = table.gathered(np.arange(5))
    with pytest.raises(ConfigError, match=r"update 2 asked for rows that have seen updates 0 to 0; catch up first"):
        table.lazy.update(rows, np.zeros((5, WIDTH), np.float32), StepScalars(learning_rate=1.0, update=2))
    rows.seen[3] = 1
    with pytest.raises(ConfigError, match=r"seen update 1, but 0 were applied"):
        table.lazy.catch_up(rows, table.applied)
    with pytest.raises(ConfigError, match=r"expected update 1, found 2"):
        table.applied.note(StepScalars(learning_rate=1.0, update=2))


@pytest.mark.parametrize("rule", [rule_of(Adafactor(), "bfloat16"), adamw("bfloat16", "int8"), adamw("bfloat16", "bfloat16")])
def test_rules_that_cannot_be_replayed_by_rows_say_so(rule):
    with pytest.raises(ConfigError, match="cannot be replayed row by row"):
        LazyRows(rule)
