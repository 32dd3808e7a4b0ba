"""Files keep the contract of `BlockFile`: complete or an error, aligned, in range. Run: pytest tests/files/test_files.py"""

import errno
import os
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from drawn_bytes import random_bytes

from headrace.files import BLOCK_BYTES, BlockFile, DirectFile
from headrace.machine.host_memory import huge_page_buffer
from headrace.terms.errors import DiskFull, ShortTransfer, StorageError
from headrace.testing import Fault, FaultKind, FaultyFile, MemoryFile, ThrottledFile

SIZE = 16 * BLOCK_BYTES


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def open_without_direct(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_without_direct)


@pytest.fixture(params=["direct", "buffered", "memory", "faulty", "throttled"])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: BlockFile
    if request.param == "memory":
        made = MemoryFile(SIZE)
    else:
        if request.param == "buffered":
            refuse_direct(monkeypatch)
        made = DirectFile.create(tmp_path / "file", SIZE)
    if request.param == "faulty":
        made = FaultyFile(made, [])
    if request.param == "throttled":
        made = ThrottledFile(made, read_bytes_per_second=1e9, write_bytes_per_second=1e9)
    yield made
    made.close()


def test_what_was_written_is_read_back(file: BlockFile) -> None:
    data = random_bytes(5 * BLOCK_BYTES)
    file.write_from(3 * BLOCK_BYTES, data)
    file.sync()
    into = huge_page_buffer(SIZE)
    file.read_into(0, into)
    assert np.array_equal(into[3 * BLOCK_BYTES : 8 * BLOCK_BYTES], data)
    assert not into[: 3 * BLOCK_BYTES].any()
    assert not into[8 * BLOCK_BYTES :].any()


def test_a_new_file_has_its_size_and_grows(file: BlockFile) -> None:
    data = random_bytes(BLOCK_BYTES)
    assert file.size_bytes == SIZE
    file.write_from(0, data)
    file.extend(2 * SIZE)
    file.extend(SIZE)  # never shrinks
    assert file.size_bytes == 2 * SIZE
    file.write_from(2 * SIZE - BLOCK_BYTES, data)
    into = huge_page_buffer(BLOCK_BYTES)
    for offset in (0, 2 * SIZE - BLOCK_BYTES):
        file.read_into(offset, into)
        assert np.array_equal(into, data)


@pytest.mark.parametrize(
    ("offset", "start", "length"),
    [(1, 0, BLOCK_BYTES), (0, 0, 100), (0, 8, BLOCK_BYTES), (SIZE, 0, BLOCK_BYTES), (-BLOCK_BYTES, 0, BLOCK_BYTES)],
)
def test_misaligned_or_outside_is_refused_with_the_numbers(file: BlockFile, offset: int, start: int, length: int) -> None:
    buffer = huge_page_buffer(4 * BLOCK_BYTES)[start : start + length]
    with pytest.raises(StorageError, match=str(offset)):
        file.read_into(offset, buffer)
    with pytest.raises(StorageError, match=str(offset)):
        file.write_from(offset, buffer)


def test_other_arrays_than_flat_bytes_are_refused(file: BlockFile) -> None:
    for buffer in (huge_page_buffer(SIZE)[::2], huge_page_buffer(SIZE).reshape(2, -1), huge_page_buffer(SIZE).view(np.int16)):
        with pytest.raises(StorageError, match="contiguous 1-D uint8"):
            file.read_into(0, buffer)  # type: ignore[arg-type]


def test_use_after_close_is_an_error_and_close_may_be_repeated(tmp_path: Path) -> None:
    file = DirectFile.create(tmp_path / "file", SIZE)
    file.close()
    file.close()
    with pytest.raises(StorageError, match="after close"):
        file.read_into(0, huge_page_buffer(BLOCK_BYTES))


def test_opening_finds_the_content_and_refuses_what_is_no_file(tmp_path: Path) -> None:
    data = random_bytes(BLOCK_BYTES)
    made = DirectFile.create(tmp_path / "file", SIZE)
    made.write_from(0, data)
    made.close()
    found = DirectFile.open(tmp_path / "file")
    into = huge_page_buffer(BLOCK_BYTES)
    found.read_into(0, into)
    found.close()
    assert np.array_equal(into, data)
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(StorageError, match="cannot open"):
            DirectFile.open(path)
    with pytest.raises(StorageError, match="cannot create"):
        DirectFile.create(tmp_path / "file", SIZE)


def test_partial_transfers_are_continued_even_inside_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_bytes(SIZE)
    file = DirectFile.create(tmp_path / "file", SIZE)
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def in_bits(descriptor, buffers, offset, real=real):
            count = real(descriptor, [buffers[0][: 2 * BLOCK_BYTES]], offset)
            return count - 100 if len(buffers[0]) > 2 * BLOCK_BYTES else count

        monkeypatch.setattr(os, name, in_bits)
    into = huge_page_buffer(SIZE)
    file.write_from(0, data)
    file.read_into(0, into)
    file.close()
    assert np.array_equal(into, data)


def test_a_file_cut_short_raises_short_transfer(tmp_path: Path) -> None:
    file = DirectFile.create(tmp_path / "file", SIZE)
    os.truncate(tmp_path / "file", 2 * BLOCK_BYTES + 17)
    with pytest.raises(
        ShortTransfer, match=rf"file: read at offset {BLOCK_BYTES}: wanted {3 * BLOCK_BYTES} bytes, got {BLOCK_BYTES}"
    ):
        file.read_into(BLOCK_BYTES, huge_page_buffer(3 * BLOCK_BYTES))
    file.close()


def raise_error(code: int):
    def call(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


def test_no_space_when_reserving_names_the_bytes_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", raise_error(errno.ENOSPC))
    with pytest.raises(DiskFull, match=rf"{SIZE} bytes .* needed, \d+ bytes .* free"):
        DirectFile.create(tmp_path / "file", SIZE)
    assert list(tmp_path.iterdir()) == []


def test_no_space_when_growing_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DirectFile.create(tmp_path / "file", SIZE)
    monkeypatch.setattr(os, "posix_fallocate", raise_error(errno.ENOSPC))
    with pytest.raises(DiskFull):
        file.extend(2 * SIZE)
    assert file.size_bytes == os.stat(tmp_path / "file").st_size == SIZE
    file.close()


@pytest.mark.parametrize(("code", "expected"), [(errno.EIO, StorageError), (errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull)])
def test_system_errors_are_named_with_path_and_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, expected: type[StorageError]
) -> None:
    file = DirectFile.create(tmp_path / "file", SIZE)
    monkeypatch.setattr(os, "pwritev", raise_error(code))
    with pytest.raises(expected, match="file"):
        file.write_from(BLOCK_BYTES, random_bytes(BLOCK_BYTES))
    monkeypatch.setattr(os, "fdatasync", raise_error(code))
    with pytest.raises(StorageError, match="fdatasync"):
        file.sync()
    file.close()


def test_without_direct_the_page_cache_is_emptied_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_direct(monkeypatch)
    monkeypatch.setattr("headrace.files.direct._MAX_DIRTY_BYTES", 4 * BLOCK_BYTES)
    file = DirectFile.create(tmp_path / "file", SIZE)
    assert not file.direct
    dropped: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, offset, length, advice: dropped.append((offset, length)))
    for index in range(8):
        file.write_from(index * BLOCK_BYTES, random_bytes(BLOCK_BYTES))
    file.read_into(0, huge_page_buffer(BLOCK_BYTES))
    file.close()
    assert dropped == [(0, 0), (0, 0), (0, BLOCK_BYTES)]


def test_direct_is_given_up_where_the_transfer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DirectFile.create(tmp_path / "file", SIZE).close()
    monkeypatch.setattr(os, "preadv", raise_error(errno.EINVAL))
    file = DirectFile.open(tmp_path / "file")
    file.close()
    assert not file.direct


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(FaultKind.SHORT, ShortTransfer), (FaultKind.EIO, StorageError), (FaultKind.NO_SPACE, DiskFull)],
)
def test_a_scripted_fault_strikes_exactly_its_call(kind: FaultKind, expected: type[StorageError]) -> None:
    script = [Fault(verb=verb, call=1, kind=kind, amount=BLOCK_BYTES) for verb in ("read", "write")]
    inner = MemoryFile(SIZE)
    file = FaultyFile(inner, script)
    data, into = random_bytes(2 * BLOCK_BYTES), huge_page_buffer(2 * BLOCK_BYTES)
    file.write_from(0, data)
    with pytest.raises(expected):
        file.write_from(4 * BLOCK_BYTES, data)
    file.read_into(4 * BLOCK_BYTES, into)
    moved = BLOCK_BYTES if kind is FaultKind.SHORT else 0
    assert np.array_equal(into[:moved], data[:moved])
    assert not into[moved:].any()
    with pytest.raises(expected):
        file.read_into(0, into)
    file.read_into(0, into)
    assert np.array_equal(into, data)


def test_a_scripted_flip_changes_one_bit_and_not_the_callers_buffer() -> None:
    data = random_bytes(2 * BLOCK_BYTES)
    before = data.copy()
    inner = MemoryFile(SIZE)
    FaultyFile(inner, [Fault(verb="write", call=0, kind=FaultKind.FLIP, amount=77)]).write_from(0, data)
    assert np.array_equal(data, before)
    into = huge_page_buffer(2 * BLOCK_BYTES)
    inner.read_into(0, into)
    assert np.flatnonzero(into != data).tolist() == [77]
    FaultyFile(inner, [Fault(verb="read", call=0, kind=FaultKind.FLIP, amount=77)]).read_into(0, into)
    assert np.array_equal(into, data)


def test_a_throttled_file_keeps_to_its_speed_in_each_direction() -> None:
    file = ThrottledFile(MemoryFile(SIZE), read_bytes_per_second=SIZE / 0.05, write_bytes_per_second=SIZE / 0.1)
    buffer = huge_page_buffer(SIZE)
    start = time.monotonic()
    file.write_from(0, buffer)
    assert time.monotonic() - start >= 0.1
    start = time.monotonic()
    file.read_into(0, buffer)
    assert time.monotonic() - start >= 0.05


class TestCopyOnWrite:
    """Files of file systems that put changed blocks elsewhere are told not to, while they are empty."""

    def test_the_flag_is_added_to_those_that_are_there_before_space_is_reserved(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[tuple[int, bytes, int]] = []

        def ioctl(descriptor: int, request: int, data: bytes) -> bytes:
            calls.append((request, data, os.fstat(descriptor).st_size))
            return struct.pack("ii", 0x10, 0)

        monkeypatch.setattr("fcntl.ioctl", ioctl)
        DirectFile.create(tmp_path / "file", SIZE).close()
        assert calls == [(0x80086601, bytes(8), 0), (0x40086602, struct.pack("ii", 0x00800010, 0), 0)]

    def test_a_file_system_that_knows_no_such_flag_is_left_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def ioctl(*_: object) -> bytes:
            raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")

        monkeypatch.setattr("fcntl.ioctl", ioctl)
        file = DirectFile.create(tmp_path / "file", SIZE)
        assert file.size_bytes == SIZE
        file.close()
