"""The last commit can be read while the next step is written, and is not replaced meanwhile.

Run: pytest tests/store/test_committed.py
"""

import threading
from pathlib import Path

import numpy as np
import pytest
from store_world import LAYOUTS, expected_weights, filled, holds_step, make_store, write_step

from headrace.store.committed import CommittedState
from headrace.terms.errors import StorageError
from headrace.terms.families import STATES, WEIGHTS


def weights_of(state: CommittedState, unit: int) -> np.ndarray:
    into = filled(LAYOUTS[unit].num_elements * 2, 99)
    state.read(unit, WEIGHTS, into).wait()
    return into


def test_it_stays_what_it_was_while_the_next_step_is_written(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        for step in (1, 2):
            write_step(store, step)
            store.commit({"step": step})
        with store.committed() as state:
            write_step(store, 3)
            write_step(store, 4)
            assert all(np.array_equal(weights_of(state, unit), expected_weights(2, unit)) for unit in (0, 1))
            store.abandon()
            assert np.array_equal(weights_of(state, 1), expected_weights(2, 1))


def test_the_next_commit_waits_for_it(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        write_step(store, 1)
        store.commit({"step": 1})
        state, asked = store.committed(), threading.Event()
        write_step(store, 2)

        def commit() -> None:
            asked.set()
            store.commit({"step": 2})

        thread = threading.Thread(target=commit)
        thread.start()
        asked.wait()
        assert np.array_equal(weights_of(state, 0), expected_weights(1, 0))
        assert store.committed_version == 1
        state.close()
        state.close()
        thread.join()
        assert store.committed_version == 2
        assert holds_step(store, 2)


def test_what_was_never_written_reads_as_zeros(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        store.commit({})
        write_step(store, 1)
        with store.committed() as state:
            assert not weights_of(state, 0).any()


def test_wrong_places_are_refused(tmp_path: Path) -> None:
    with make_store(tmp_path) as store, store.committed() as state:
        with pytest.raises(StorageError, match="no family"):
            state.read(0, "nothing", filled(4096, 1))
        with pytest.raises(StorageError, match="expected"):
            state.read(0, STATES, filled(4096, 1), 0)
