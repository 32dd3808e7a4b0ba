"""Striping loses and mixes nothing, for any weights. Run: pytest tests/files/test_volume.py"""

from collections.abc import Iterator

import numpy as np
import pytest
from drawn_bytes import random_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.files import BLOCK_BYTES, ThreadEngine, Volume, striping_weights
from headrace.files.volume import Striping
from headrace.machine.host_memory import huge_page_buffer
from headrace.terms.errors import StorageError
from headrace.testing import MemoryFile


@pytest.fixture(scope="module")
def engine() -> Iterator[ThreadEngine]:
    with ThreadEngine(2, 2, piece_bytes=2 * BLOCK_BYTES) as made:
        yield made


def make_volume(weights: list[int], capacity_blocks: int, stripe_blocks: int, engine: ThreadEngine) -> Volume:
    sizes = Volume.file_bytes(capacity_blocks * BLOCK_BYTES, weights, stripe_blocks * BLOCK_BYTES)
    files = [MemoryFile(size, f"file{index}") for index, size in enumerate(sizes)]
    return Volume(files, weights, stripe_blocks * BLOCK_BYTES, engine)


some_weights = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(weights=some_weights, capacity=st.integers(1, 64), stripe=st.integers(1, 4), data=st.data())
def test_a_volume_behaves_as_one_array(
    weights: list[int], capacity: int, stripe: int, data: st.DataObject, engine: ThreadEngine
) -> None:
    volume = make_volume(weights, capacity, stripe, engine)
    model = np.zeros(capacity * BLOCK_BYTES, dtype=np.uint8)
    for seed in range(data.draw(st.integers(1, 5))):
        start = data.draw(st.integers(0, capacity - 1))
        stop = data.draw(st.integers(start, capacity))
        content = random_bytes((stop - start) * BLOCK_BYTES, seed)
        volume.write(start * BLOCK_BYTES, content).wait()
        model[start * BLOCK_BYTES : stop * BLOCK_BYTES] = content
    start = data.draw(st.integers(0, capacity))
    for first, last in ((0, capacity), (start, capacity), (0, start)):
        into = huge_page_buffer((last - first) * BLOCK_BYTES)
        volume.read(first * BLOCK_BYTES, into).wait()
        assert np.array_equal(into, model[first * BLOCK_BYTES : last * BLOCK_BYTES])


@given(weights=some_weights, capacity=st.integers(0, 200), stripe=st.integers(1, 4))
def test_places_are_distinct_dense_and_as_many_as_said(weights: list[int], capacity: int, stripe: int) -> None:
    striping = Striping.of(weights, stripe * BLOCK_BYTES)
    needed = striping.file_bytes(capacity * BLOCK_BYTES)
    assert sum(needed) == capacity * BLOCK_BYTES
    places = {striping.locate(block * BLOCK_BYTES) for block in range(capacity)}
    expected = {(index, offset) for index, size in enumerate(needed) for offset in range(0, size, BLOCK_BYTES)}
    assert places == expected


@given(weights=some_weights, rounds=st.integers(1, 5))
def test_bytes_are_shared_in_proportion_to_the_weights(weights: list[int], rounds: int) -> None:
    needed = Volume.file_bytes(rounds * sum(weights) * BLOCK_BYTES, weights, BLOCK_BYTES)
    assert list(needed) == [rounds * weight * BLOCK_BYTES for weight in weights]


@settings(max_examples=30, deadline=None)
@given(weights=some_weights, before=st.integers(1, 30), added=st.integers(1, 30), stripe=st.integers(1, 3))
def test_growing_moves_nothing(weights: list[int], before: int, added: int, stripe: int, engine: ThreadEngine) -> None:
    volume = make_volume(weights, before, stripe, engine)
    old, new = random_bytes(before * BLOCK_BYTES, 1), random_bytes(added * BLOCK_BYTES, 2)
    volume.write(0, old).wait()
    volume.extend((before + added) * BLOCK_BYTES)
    volume.write(before * BLOCK_BYTES, new).wait()
    into = huge_page_buffer((before + added) * BLOCK_BYTES)
    volume.read(0, into).wait()
    assert np.array_equal(into, np.concatenate([old, new]))


def test_one_file_is_the_identity(engine: ThreadEngine) -> None:
    volume = make_volume([3], 10, 1, engine)
    assert [volume.locate(offset)[1] for offset in (0, 5000, 36864)] == [0, 5000, 36864]
    assert Volume.file_bytes(10 * BLOCK_BYTES, [3], BLOCK_BYTES) == (10 * BLOCK_BYTES,)


def test_turns_of_a_heavy_file_are_spread_out() -> None:
    assert [file for file, _ in Striping.of([2, 1, 1], BLOCK_BYTES).cycle] == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("offset", "length"), [(100, BLOCK_BYTES), (0, 100), (64 * BLOCK_BYTES, BLOCK_BYTES), (-BLOCK_BYTES, BLOCK_BYTES)]
)
def test_misaligned_or_outside_is_refused_before_anything_moves(offset: int, length: int, engine: ThreadEngine) -> None:
    volume = make_volume([2, 1], 64, 2, engine)
    buffer = random_bytes(2 * BLOCK_BYTES)[:length]
    written = engine.bytes_written
    with pytest.raises(StorageError, match="file"):
        volume.read(offset, buffer)
    with pytest.raises(StorageError, match="file"):
        volume.write(offset, buffer)
    assert engine.bytes_written == written


@pytest.mark.parametrize(("weights", "stripe"), [([], BLOCK_BYTES), ([1, 0], BLOCK_BYTES), ([1], 100), ([1], 0)])
def test_bad_weights_and_stripes_are_refused(weights: list[int], stripe: int) -> None:
    with pytest.raises(StorageError, match="expected"):
        Striping.of(weights, stripe)


def test_files_and_weights_must_match(engine: ThreadEngine) -> None:
    with pytest.raises(StorageError, match="1 files and 2 striping weights"):
        Volume([MemoryFile(BLOCK_BYTES)], [1, 1], BLOCK_BYTES, engine)


@given(st.lists(st.floats(1e8, 2e10), min_size=1, max_size=4))
def test_weights_come_near_the_best_use_of_all_drives(speeds: list[float]) -> None:
    weights = striping_weights(speeds)
    assert all(1 <= weight <= 16 for weight in weights)
    if min(speeds) >= max(speeds) / 16:
        total = sum(weights) * min(speed / weight for weight, speed in zip(weights, speeds, strict=True))
        assert total >= 0.6 * sum(speeds)


def test_equal_drives_get_equal_weights() -> None:
    assert striping_weights([3e9, 3e9]) == (1, 1)
    assert striping_weights([7e9, 3.5e9]) == (2, 1)
