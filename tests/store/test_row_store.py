"""Rows on a drive: read as written, and after a crash at any moment as they were committed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.machine.host_memory import huge_page_buffer
from headrace.store.row_store import RowLayout, RowStore
from headrace.terms.errors import StorageError
from headrace.testing.memory_file import MemoryFile
from headrace.testing.power_supply import PowerSupply

LAYOUTS = (RowLayout(50, 400), RowLayout(7, 6000))  # several rows a page; two blocks a row


def changed(store, ids, update, value):
    """Read rows, set them to `value`, and write them."""
    pages = store.read(ids)
    at = pages.positions(ids)
    pages.rows[at], pages.seen[at] = value, update
    store.write(pages, update)


def content(store):
    ids = np.arange(store.layout.num_rows)
    pages = store.read(ids)
    at = pages.positions(ids)
    rows = pages.rows[at]
    assert (rows == rows[:, :1]).all()  # no row is mixed
    return list(zip(pages.seen[at].tolist(), rows[:, 0].tolist(), strict=True))


def commit(store):
    history = store.seal()
    store.committed()
    return history


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_read_as_they_were_written_and_the_others_stay(layout):
    store = RowStore(MemoryFile(layout.file_bytes), layout)
    assert content(store) == [(0, 0)] * layout.num_rows
    expected = content(store)
    for update in range(1, 6):
        ids = np.array([update, update + 1, 0])
        changed(store, ids, update, update)
        for row in ids:
            expected[row] = (update, update)
        assert content(store) == expected
        commit(store)
        assert content(store) == expected


def test_small_rows_share_a_page_and_large_ones_take_whole_blocks():
    small, large = LAYOUTS
    assert (small.rows_per_page, small.page_bytes, small.file_bytes) == (9, 4096, 2 * 6 * 4096)
    assert (large.rows_per_page, large.page_bytes, large.file_bytes) == (1, 8192, 2 * 7 * 8192)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_an_interrupted_step_left_is_never_taken_for_a_later_step_of_its_number(layout):
    file = MemoryFile(layout.file_bytes)
    store = RowStore(file, layout)
    changed(store, np.array([1]), 1, 1)
    history = commit(store)
    changed(store, np.array([1, 2]), 2, 9)  # and the process is killed
    store = RowStore(file, layout, history)
    assert content(store)[1:3] == [(1, 1), (0, 0)]
    changed(store, np.array([layout.num_rows - 1]), 2, 2)  # other rows than the lost step
    history = commit(store)
    for each in (store, RowStore(file, layout, history)):
        assert content(each)[1:3] == [(1, 1), (0, 0)]
        assert content(each)[-1] == (2, 2)


def test_an_abandoned_update_is_forgotten():
    store = RowStore(MemoryFile(LAYOUTS[0].file_bytes), LAYOUTS[0])
    changed(store, np.array([3]), 1, 1)
    commit(store)
    changed(store, np.array([3]), 2, 2)
    store.abandon()
    assert content(store)[3] == (1, 1)
    changed(store, np.array([4]), 2, 5)
    commit(store)
    assert content(store)[3:5] == [(1, 1), (2, 5)]


@settings(max_examples=12, deadline=None)
@given(layout=st.sampled_from(LAYOUTS), cut_at=st.integers(0, 60), seed=st.integers(0, 1 << 30))
def test_after_a_power_cut_all_rows_are_as_committed_and_the_run_goes_on(tmp_path_factory, layout, cut_at, seed):
    supply, rng = PowerSupply(cut_at, seed), np.random.default_rng(seed)
    path = tmp_path_factory.mktemp("rows") / "rows"
    store = RowStore(supply.open_file(path, layout.file_bytes), layout)
    history, update, expected = (), 0, [(0, 0)] * layout.num_rows
    for session in range(2):
        committed = list(expected)
        try:
            for _ in range(8):
                update += 1
                ids = rng.choice(layout.num_rows, 3, replace=False)
                changed(store, ids, update, update + 100 * session)
                for row in ids:
                    committed[row] = (update, update + 100 * session)
                sealed = store.seal()
                history, expected = sealed, list(committed)  # the record is durable
                store.committed()
        except StorageError:
            update = max((last for _, last in history), default=0)
        supply.cut()
        supply = PowerSupply(10**9, seed)
        store = RowStore(supply.open_file(path, None), layout, history)
        assert content(store) == expected


@pytest.mark.parametrize("byte", [0, 20, 32, 50, 3000])
def test_damage_of_the_committed_place_is_an_error_and_never_the_older_row(byte):
    layout = LAYOUTS[0]
    file = MemoryFile(layout.file_bytes)
    store = RowStore(file, layout)
    for update in (1, 2, 3):  # places 1, 0, 1 of page 0
        changed(store, np.array([2]), update, update)
        history = commit(store)
    page = huge_page_buffer(2 * 4096)
    file.read_into(0, page)
    page[3000] ^= 1  # the older place
    file.write_from(0, page)
    assert content(RowStore(file, layout, history))[2] == (3, 3)
    page[4096 + byte] ^= 1
    file.write_from(0, page)
    with pytest.raises(StorageError, match="page 0 is damaged"):
        RowStore(file, layout, history).read(np.array([2]))


def test_a_page_at_another_ones_place_is_seen():
    layout = LAYOUTS[0]
    file = MemoryFile(layout.file_bytes)
    store = RowStore(file, layout)
    changed(store, np.array([0]), 1, 1)
    history = commit(store)
    page = huge_page_buffer(4096)
    file.read_into(4096, page)  # the first version goes to place 1
    file.write_from(2 * 4096, page)
    with pytest.raises(StorageError, match="page 1 is damaged"):
        RowStore(file, layout, history).read(np.array([9]))


def test_misuse_is_refused():
    layout = LAYOUTS[0]
    with pytest.raises(StorageError, match="49152 bytes expected, found 4096"):
        RowStore(MemoryFile(4096), layout)
    store = RowStore(MemoryFile(layout.file_bytes), layout)
    with pytest.raises(StorageError, match="rows 0 to 49; asked 3 to 50"):
        store.read(np.array([3, 50]))
    pages = store.read(np.array([1]))
    store.write(pages, 1)
    store.seal()
    with pytest.raises(StorageError, match="update 2 asked while a commit is under way"):
        store.write(pages, 2)
