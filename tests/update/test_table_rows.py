"""Rows of tables on a drive, through whole steps: the bits of dense updates, and after a kill those of the last commit."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from update_planes import adamw

from headrace.terms.errors import StorageError
from headrace.terms.layout import PARAMETER_ALIGNMENT, lay_out, part, realigned
from headrace.testing.memory_file import MemoryFile
from headrace.testing.power_supply import PowerSupply
from headrace.update import StepScalars
from headrace.update.rules.norm import BLOCK_ELEMENTS, square_sum
from headrace.update.rules.rule import Chunk
from headrace.update.tables.lazy_rows import AppliedUpdates, LazyRows
from headrace.update.tables.table_rows import OpenTable, TableRows, row_layout

ROWS, WIDTH, DECAY, SCALE = 60, 16, 0.1, 0.5


class Dense:
    """The same table, updated whole by the rule."""

    def __init__(self, rule):
        self.rule = rule
        self.planes = [np.zeros(ROWS * WIDTH, plane.dtype) for plane in (rule.planes.weight, *rule.planes.states)]

    def step(self, ids, gradient, step):
        whole = np.zeros((ROWS, WIDTH), np.float32)
        whole[ids] = gradient
        self.rule.apply(Chunk(self.planes[0], tuple(self.planes[1:]), whole.reshape(-1)), step, DECAY, SCALE)

    @property
    def weight(self):
        return self.planes[0].reshape(ROWS, WIDTH)


def opened(file, rule, record=None, **more):
    """Rows as they are after what a record says."""
    record = json.loads(json.dumps(record)) if record else {"learning_rates": (), "histories": {"3": ()}}
    history = tuple((session, update) for session, update in record["histories"]["3"])
    table = OpenTable.on(file, LazyRows(rule, DECAY, SCALE), ROWS, WIDTH, history)
    return TableRows({3: table}, AppliedUpdates(record["learning_rates"]), **more)


def new_file(rule):
    return MemoryFile(row_layout(ROWS, WIDTH, rule.planes).file_bytes)


def zipf_step(dice, update):
    """The rows that a step's micro-batches touch, their gradients, and its scalars."""
    odds = 1 / np.arange(1, ROWS + 1)
    ids = [np.unique(dice.choice(ROWS, 6, p=odds / odds.sum())) for _ in range(2)]
    gradients = [dice.standard_normal((each.size, WIDTH)).astype(np.float32) for each in ids]
    return ids, gradients, StepScalars(learning_rate=1e-2 / update, update=update, gradient_scale=dice.choice([1.0, 0.37]))


def take(rows, dense, ids, gradients, step):
    """Take a step in both; what is gathered has the bits of the dense table."""
    for each in ids:
        assert np.array_equal(rows.gather(3, each), dense.weight[each])
    for each, gradient in zip(ids, gradients, strict=True):
        rows.add(3, each, gradient)
    whole = np.zeros((ROWS, WIDTH), np.float32)
    for each, gradient in zip(ids, gradients, strict=True):
        whole[each] += gradient
    rows.conclude(lambda unit: step)
    dense.step(np.arange(ROWS), whole, step)


def same(rows, dense):
    return np.array_equal(np.concatenate(list(rows.weights(3))), dense.weight)


@pytest.mark.parametrize("every", [1, 4])
def test_fifty_steps_of_a_zipf_stream_have_the_bits_of_dense_adamw(every):
    """With decay, a schedule, clip factors, skipped steps, commits each step or seldom; opened again on the way."""
    rule, dice = adamw("float32"), np.random.default_rng(3)
    file, dense, record = new_file(rule), Dense(rule), None
    rows = opened(file, rule)
    for update in range(1, 51):
        step = zipf_step(dice, update)
        if update % 7 == 0:  # one that is skipped changes nothing
            rows.gather(3, step[0][0])
            rows.add(3, step[0][0], step[1][0] * np.float32("inf"))
            assert not np.isfinite(rows.square_sums()[0])
            rows.conclude(None)
        take(rows, dense, *step)
        if update % every == 0:
            record = rows.seal(update)
            rows.committed()
        if update == 24:
            rows = opened(file, rule, record)
        if update % 10 == 0:
            assert same(rows, dense)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_begin_as_a_file_has_them_have_the_bits_of_dense_adamw(dtype):
    """Weights, both moments, and the norm of a gradient that is rounded once it is summed; rows share pages with new ones."""
    rule, dice = adamw("float32"), np.random.default_rng(11)
    start, dense, asked = dice.standard_normal((ROWS, WIDTH)).astype(np.float32), Dense(rule), []

    def first(ids):
        asked.append(ids)
        return start[ids]

    dense.planes[0][:] = start.reshape(-1)
    file, kind = new_file(rule), getattr(torch, dtype)
    more = {"first": first, "gradient_dtype": kind}
    table = OpenTable.on(file, LazyRows(rule, DECAY, SCALE), ROWS, WIDTH, **more)
    rows = TableRows({3: table}, AppliedUpdates())
    for update in range(1, 51):
        ids, gradients, step = zipf_step(dice, update)
        whole = np.zeros((ROWS, WIDTH), np.float32)
        for each, gradient in zip(ids, gradients, strict=True):
            assert np.array_equal(rows.gather(3, each), dense.weight[each])
            rows.add(3, each, gradient)
            whole[each] += gradient
        whole = torch.from_numpy(whole).to(kind).float().numpy()
        assert rows.square_sums() == [square_sum(np.pad(whole.reshape(-1), (0, -whole.size % BLOCK_ELEMENTS)))]
        rows.conclude(lambda unit, step=step: step)
        dense.step(np.arange(ROWS), whole, step)
        if update % 3 == 0:
            record = rows.seal(update)
            rows.committed()
        if update == 24:
            record = json.loads(json.dumps(record))
            history = tuple((session, last) for session, last in record["histories"]["3"])
            table = OpenTable.on(file, LazyRows(rule, DECAY, SCALE), ROWS, WIDTH, history, **more)
            rows = TableRows({3: table}, AppliedUpdates(record["learning_rates"]))
    found = table.read(np.arange(ROWS), rows.applied)
    for own, other in zip((found.weight, *found.states), dense.planes, strict=True):
        assert np.array_equal(own.reshape(-1), other)
    assert same(rows, dense)
    assert all((np.diff(ids) > 0).all() for ids in asked)


def test_the_norm_of_few_rows_of_a_large_table_is_that_of_the_whole_gradient():
    """In blocks that rows share, and over several pieces of blocks."""
    rule, dice, width, count = adamw("float32"), np.random.default_rng(13), 1500, 3000
    table = OpenTable.on(MemoryFile(row_layout(count, width, rule.planes).file_bytes), LazyRows(rule), count, width)
    rows, ids = TableRows({3: table}, AppliedUpdates()), np.unique(dice.choice(count, 1700))
    gradient, whole = dice.standard_normal((ids.size, width)).astype(np.float32), np.zeros((count, width), np.float32)
    rows.gather(3, ids)
    rows.add(3, ids, gradient)
    whole[ids] = gradient
    assert rows.square_sums() == [square_sum(np.pad(whole.reshape(-1), (0, -whole.size % BLOCK_ELEMENTS)))]


@pytest.mark.parametrize("kind", [np.uint16, np.float16, np.float32])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_norm_of_a_unit_with_a_table_in_it_is_that_of_its_whole_gradient(place, kind):
    """Parameters before and after the table share blocks with its rows; none of them has the place that it has without it."""
    rule, dice, count, width = adamw("float32"), np.random.default_rng(17), 700, 24
    sizes = [(3, 5000), (77,), (2 * BLOCK_ELEMENTS,), (40, 50)]
    named = [(f"p{number}", shape, (1.0, DECAY * (number % 2))) for number, shape in enumerate(sizes)]
    whole = lay_out("unit", [*named[:place], ("table", (count, width), (1.0, 0.0)), *named[place:]])
    rest = realigned(whole, PARAMETER_ALIGNMENT, frozenset({"table"}))
    file = MemoryFile(row_layout(count, width, rule.planes).file_bytes)
    table = OpenTable.on(file, LazyRows(rule), count, width, whole=whole, name="table")
    rows, ids = TableRows({3: table}, AppliedUpdates()), np.unique(dice.choice(count, 90))
    gradient = dice.standard_normal((ids.size, width)).astype(np.float32)
    rows.gather(3, ids)
    rows.add(3, ids, gradient)
    found, dense = np.zeros(rest.num_elements, kind), np.zeros(whole.num_elements, np.float32)
    for spec in rest.parameters:
        values = dice.standard_normal(spec.num_elements).astype(np.float32)
        exact = (values.view(np.uint32) >> 16).astype(np.uint16) if kind == np.uint16 else values.astype(kind)
        part(found, spec)[:] = exact
        there = next(each for each in whole.parameters if each.name == spec.name)
        part(dense, there)[:] = (exact.astype(np.uint32) << 16).view(np.float32) if kind == np.uint16 else exact
    there = next(each for each in whole.parameters if each.name == "table")
    part(dense, there).reshape(count, width)[ids] = gradient
    assert rows.square_sum_with(3, rest, found) == square_sum(dense)
    assert rows.square_sum_with(2, rest, found) is None
    assert rows.square_sums() == []


def test_rows_that_are_updated_again_before_they_are_committed_are_committed_as_they_were():
    """The next step may be concluded while a commit is still to come."""
    rule, dice = adamw("float32"), np.random.default_rng(5)
    file, dense = new_file(rule), Dense(rule)
    rows = opened(file, rule)
    take(rows, dense, *zipf_step(dice, 1))
    first = dense.weight.copy()
    take(rows, dense, *zipf_step(dice, 2))
    record = rows.seal(1)
    rows.committed()
    assert same(rows, dense)
    assert np.array_equal(np.concatenate(list(opened(file, rule, record).weights(3))), first)


@settings(max_examples=15, deadline=None)
@given(cut_at=st.integers(0, 40), seed=st.integers(0, 1 << 30))
def test_a_power_cut_between_gather_and_write_leaves_the_last_commit(tmp_path_factory, cut_at, seed):
    """At any write, torn or whole: what is opened again goes on with the bits of an unbroken run."""
    rule, path = adamw("float32"), tmp_path_factory.mktemp("rows") / "rows"
    supply = PowerSupply(cut_at, seed)
    file, dense, record, update = supply.open_file(path, row_layout(ROWS, WIDTH, rule.planes).file_bytes), Dense(rule), None, 1
    rows = opened(file, rule)
    while update < 12:
        before = [plane.copy() for plane in dense.planes]
        try:
            take(rows, dense, *zipf_step(np.random.default_rng([seed, update]), update))
            sealed = rows.seal(update)
        except StorageError:
            supply.cut()
            dense.planes, supply = before, PowerSupply(10**9, seed)
            rows = opened(supply.open_file(path, None), rule, record)
            continue
        record, update = sealed, update + 1
        rows.committed()
    assert same(opened(supply.open_file(path, None), rule, record), dense)


def test_without_replay_rows_are_those_of_torchs_sparse_adam():
    rule, dice = adamw("float32"), np.random.default_rng(9)
    table = OpenTable.on(new_file(rule), LazyRows(rule, replay=False), ROWS, WIDTH)
    rows, whole = TableRows({3: table}, AppliedUpdates()), torch.nn.Parameter(torch.zeros(ROWS, WIDTH))
    plain = torch.optim.SparseAdam([whole], lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for update in range(1, 31):
        ids = np.unique(dice.choice(ROWS, 6))
        gradient = dice.standard_normal((ids.size, WIDTH)).astype(np.float32)
        rows.gather(3, ids)
        rows.add(3, ids, gradient)
        rows.conclude(lambda unit, update=update: StepScalars(learning_rate=1e-2, update=update))
        whole.grad = torch.sparse_coo_tensor(
            torch.from_numpy(ids)[None], torch.from_numpy(gradient), whole.shape, check_invariants=False
        )
        plain.step()
    found = torch.from_numpy(np.concatenate(list(rows.weights(3))))
    torch.testing.assert_close(found, whole.detach(), rtol=1e-5, atol=1e-6)


def test_rows_read_for_an_evaluation_are_not_kept_beyond_what_a_step_takes():
    rule, dice = adamw("float32"), np.random.default_rng(7)
    rows, dense = opened(new_file(rule), rule, most_held=20), Dense(rule)
    take(rows, dense, *zipf_step(dice, 1))
    for start in range(0, ROWS, 10):
        assert np.array_equal(rows.gather(3, np.arange(start, start + 10)), dense.weight[start : start + 10])
    take(rows, dense, *zipf_step(dice, 2))
    assert same(rows, dense)
