"""A copy of a model's weight files, striped over drives: the same bytes, which all drives then read at once.

    DRIVE/headrace-weights-ID/data       the stripes of that drive, its space reserved before anything is copied
    DRIVE/headrace-weights-ID/copy.json  which files, on which drives, how striped: written once all data files are there
    FIRST/headrace-weights-ID/sums       a checksum for each piece that is on the drives, in order; grows
    FIRST/headrace-weights-ID/verified   the same sums, once all pieces were read back and have them

The files follow one another in one address space, each from a whole block on. ID is a digest of the files (place, size, time of
the last change, samples of their contents) and of the drives. So changed files, or other drives, make another copy. Invariant:
a copy is read only where `verified` is there; what a kill leaves goes on at the piece where it stopped.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.files import BLOCK_BYTES, Bytes, DirectFile, ExtentReader, ThreadEngine, Ticket, Volume
from headrace.files.durable import sync, write_whole
from headrace.machine.host_memory import huge_page_buffer
from headrace.store.checksum import checksum
from headrace.store.copied_files import CopyReader, WeightFiles
from headrace.store.lock import LOCK_NAME, RunLock, lock_holder
from headrace.store.run_folders import check_directories
from headrace.terms.errors import CorruptData, RunDirectoryError, StorageError
from headrace.terms.events import Notice, Sink
from headrace.terms.json_text import parse_json
from headrace.terms.machine.drives import InFlight
from headrace.terms.sizes import MIB, format_bytes, format_seconds

PREFIX = "headrace-weights-"
_RECORD, _DATA, _SUMS, _VERIFIED = "copy.json", "data", "sums", "verified"
_NAMES = (_RECORD, _VERIFIED, _SUMS, _DATA)  # in the order in which they go
_FORMAT = 1
# After so many pieces drives are asked to have them for good, and their sums are written down: what a kill costs at most.
_PIECES_TOGETHER = 16


class WeightCopy:
    """The copy of `files` on the drives of `directories`, which may be there or not. Nothing is changed before `make`.

    Raises:
        ConfigError, StorageError: a file or a directory cannot be looked at.
    """

    def __init__(
        self, files: WeightFiles, directories: Sequence[Path], *, stripe_bytes: int = 8 * MIB, piece_bytes: int = 16 * MIB
    ) -> None:
        self.files, self._stripe_bytes, self._piece_bytes = files, stripe_bytes, piece_bytes
        self._directories = tuple(sorted(directory.resolve() for directory in directories))
        self._digest = files.digest()
        whole = json.dumps([self._digest, *map(str, self._directories)])
        self._name = PREFIX + hashlib.sha256(whole.encode()).hexdigest()[:16]
        self.folders = tuple(directory / self._name for directory in self._directories)
        self._first = self.folders[0]

    @property
    def is_whole(self) -> bool:
        """Whether it can be read."""
        path = self._first / _VERIFIED
        return self._weights() is not None and path.exists() and path.stat().st_size == self._num_pieces * 8

    @property
    def copied_bytes(self) -> int:
        """Bytes that an earlier call has copied."""
        return min(self.files.num_bytes, len(self._sums()) * self._piece_bytes) if self._weights() is not None else 0

    def reader(self, sink: Sink) -> CopyReader:
        """Open it for reading; look at its first and its last piece.

        Raises:
            CorruptData: something else lies there than was copied.
        """
        engine, volume = self._open(sink)
        try:
            sums = np.fromfile(self._first / _VERIFIED, np.uint64)
            buffer = huge_page_buffer(self._piece_bytes)
            for number in {0, len(sums) - 1}:
                part = buffer[: self._length(number)]
                volume.read(number * self._piece_bytes, part).wait()
                self._compare(volume, number, part, int(sums[number]))
        except BaseException:
            engine.close()
            volume.close()
            raise
        return CopyReader(self.files, volume, engine)

    def make(self, weights: Sequence[int], sink: Sink) -> None:
        """Copy what is missing, striped by these `weights`, read all of it back, and call it whole.

        Raises:
            DiskFull: there is not enough space; nothing is left there.
            RunDirectoryError: another process is about it.
            CorruptData: a drive gives back something else; that piece is copied again by the next call.
            StorageError: something cannot be read or written; what is copied is kept.
        """
        with self._held():
            if self.is_whole:
                return
            if self._weights() is None:
                self._reserve(weights, sink)
            engine, volume = self._open(sink)
            try:
                again = bool(self._sums())
                self._copy(volume, sink)
                try:
                    self._verify(volume)
                except CorruptData:
                    if not again:
                        raise
                    self._copy(volume, sink)  # a power cut may have taken what an earlier call had not yet on the drives
                    self._verify(volume)
            finally:
                engine.close()
                volume.close()
            if self.files.digest() != self._digest:
                (self._first / _SUMS).unlink()
                raise StorageError(f"{self.files.paths[0].parent}: its weights were changed while they were copied; try again")
            os.replace(self._first / _SUMS, self._first / _VERIFIED)
            sync(self._first)

    def outdated(self) -> list[Path]:
        """Return folders beside it with copies of the same files as they were before."""
        found = []
        for directory in self._directories:
            for folder in directory.glob(PREFIX + "*"):
                record = _record_of(folder)
                if record and record["files"] == self._file_names and record["digest"] != self._digest:
                    found.append(folder)
        return found

    # -- how it lies on the drives ----------------------------------------------------------------------------------

    @property
    def _file_names(self) -> list[str]:
        return [str(path.resolve()) for path in self.files.paths]

    def _weights(self) -> list[int] | None:
        """Return the stripes' weights; None where the copy was not begun, or lacks a part."""
        records = [_record_of(folder) for folder in self.folders]
        first = records[0]
        if first is None or any(record != first for record in records) or first["digest"] != self._digest:
            return None
        weights: list[int] = first["weights"]
        self._stripe_bytes, self._piece_bytes = first["stripe_bytes"], first["piece_bytes"]
        sizes = Volume.file_bytes(self.files.num_bytes, weights, self._stripe_bytes)
        paths = [folder / _DATA for folder in self.folders]
        there = all(path.is_file() and path.stat().st_size >= size for path, size in zip(paths, sizes, strict=True))
        return weights if there else None

    def _reserve(self, weights: Sequence[int], sink: Sink) -> None:
        """Make folders, data files and, last, the records."""
        sizes = Volume.file_bytes(self.files.num_bytes, weights, self._stripe_bytes)
        self._remove()  # of a call that was killed before it had the space, or that lost a drive's part
        check_directories(self._directories, sizes, what="a copy of the weights", allow_in_memory=False, sink=sink)
        record = {
            "format": _FORMAT,
            "digest": self._digest,
            "files": self._file_names,
            "directories": [str(directory) for directory in self._directories],
            "weights": list(weights),
            "stripe_bytes": self._stripe_bytes,
            "piece_bytes": self._piece_bytes,
        }
        try:
            for folder, size in zip(self.folders, sizes, strict=True):
                folder.mkdir(exist_ok=True)
                DirectFile.create(folder / _DATA, max(size, BLOCK_BYTES)).close()
                sync(folder.parent)
            for folder in self.folders:
                write_whole(folder / _RECORD, json.dumps(record) + "\n")
        except BaseException:
            self._remove()
            raise

    def _remove(self) -> None:
        for folder in self.folders:
            for name in _NAMES:
                (folder / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the lock of the first folder; remove what is empty at the end."""
        try:
            self._first.mkdir(exist_ok=True)
            lock = RunLock(self._first)
        except RunDirectoryError as error:
            holder = lock_holder(self._first)
            raise RunDirectoryError(
                f"{self._first}: process {holder} copies the weights there; wait for it, or give --no-copy-weights"
            ) from error
        except OSError as error:
            raise StorageError(f"{self._first}: cannot be made: {error.strerror}; name another --ssd") from error
        try:
            yield
        finally:
            if not (self._first / _RECORD).exists():  # nothing was begun: nothing is left
                (self._first / LOCK_NAME).unlink(missing_ok=True)
                for folder in self.folders:
                    with contextlib.suppress(OSError):
                        folder.rmdir()
            lock.release()

    def _open(self, sink: Sink) -> tuple[ThreadEngine, Volume]:
        weights = self._weights()
        assert weights is not None, "it is there"
        threads = InFlight().threads * len(self.folders)
        engine = ThreadEngine(threads, threads, sink=sink)
        files: list[DirectFile] = []
        try:
            for folder in self.folders:
                files.append(DirectFile.open(folder / _DATA))
        except BaseException:
            engine.close()
            for file in files:
                file.close()
            raise
        return engine, Volume(files, weights, self._stripe_bytes, engine)

    # -- pieces -----------------------------------------------------------------------------------------------------

    @property
    def _num_pieces(self) -> int:
        return -(-self.files.num_bytes // self._piece_bytes)

    def _length(self, number: int) -> int:
        return min(self._piece_bytes, self.files.num_bytes - number * self._piece_bytes)

    def _sums(self) -> list[int]:
        """Return the sums of pieces that are on the drives; what a kill left of one does not count."""
        try:
            content = (self._first / _SUMS).read_bytes()
        except FileNotFoundError:
            return []
        return list(map(int, np.frombuffer(content[: len(content) // 8 * 8], np.uint64)))[: self._num_pieces]

    def _copy(self, volume: Volume, sink: Sink) -> None:
        """Copy the pieces that are missing; while one is written the next is read."""
        begin, started = len(self._sums()), time.monotonic()
        with (self._first / _SUMS).open("ab") as sums, ExtentReader(self.files.paths, sink=sink) as reader:
            os.truncate(sums.fileno(), begin * 8)
            found: list[int] = []

            def keep() -> None:
                volume.sync()
                sums.write(np.array(found, np.uint64).tobytes())
                sums.flush()
                os.fsync(sums.fileno())
                found.clear()

            tenth = begin * 10 // self._num_pieces
            for number, part in self._pieces(begin, lambda number, part: self._read_source(reader, number, part)):
                found.append(checksum(part))
                volume.write(number * self._piece_bytes, part).wait()
                if len(found) == _PIECES_TOGETHER or number + 1 == self._num_pieces:
                    keep()
                if (now := (number + 1) * 10 // self._num_pieces) > tenth and now < 10:
                    tenth = now
                    left = (time.monotonic() - started) / (number + 1 - begin) * (self._num_pieces - number - 1)
                    sink(Notice(text=f"weights: {now}0 % copied, {format_seconds(left)} left", level="info"))

    def _read_source(self, reader: ExtentReader, number: int, part: Bytes) -> Ticket:
        part[:] = 0  # behind a file's end
        start = number * self._piece_bytes
        return reader.read(self.files.extents(start, start + part.size), part)

    def _verify(self, volume: Volume) -> None:
        """Read everything back. What is not what was written is forgotten, with all that comes behind it."""
        sums = self._sums()
        for number, part in self._pieces(0, lambda number, part: volume.read(number * self._piece_bytes, part)):
            try:
                self._compare(volume, number, part, sums[number])
            except CorruptData:
                os.truncate(self._first / _SUMS, number * 8)
                raise

    def _pieces(self, begin: int, read: Callable[[int, Bytes], Ticket]) -> Iterator[tuple[int, Bytes]]:
        """Yield pieces as `read` brings them, the next one being read meanwhile."""
        buffers = huge_page_buffer(self._piece_bytes), huge_page_buffer(self._piece_bytes)
        pending: tuple[Ticket, Bytes] | None = None
        for number in range(begin, self._num_pieces + 1):
            before, pending = pending, None
            if number < self._num_pieces:
                part = buffers[number % 2][: self._length(number)]
                pending = read(number, part), part
            if before is not None:
                before[0].wait()
                yield number - 1, before[1]

    def _compare(self, volume: Volume, number: int, part: Bytes, expected: int) -> None:
        if checksum(part) != expected:
            path, offset = volume.locate(number * self._piece_bytes)
            raise CorruptData(
                f"{path}: {format_bytes(part.size)} from about offset {offset} on are not what was copied. The drive may be "
                f"failing, or the file was changed; remove {' and '.join(map(str, self.folders))}, then give the same "
                "command again"
            )


def _record_of(folder: Path) -> dict[str, Any] | None:
    """Return the record in a folder; None if there is none that is understood."""
    try:
        found = parse_json((folder / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("format") == _FORMAT else None


def remove_copy(folder: Path) -> None:
    """Remove the part of a copy in `folder`. Who reads it has it open, and goes on.

    Raises:
        RunDirectoryError: a process makes the copy just now.
        OSError: something in it cannot be removed, or something else is in it.
    """
    record = _record_of(folder)
    first = Path(record["directories"][0]) / folder.name if record else folder
    lock = RunLock(first, needed=False)
    try:
        for name in _NAMES:
            (folder / name).unlink(missing_ok=True)
        (folder / LOCK_NAME).unlink(missing_ok=True)
        folder.rmdir()
    finally:
        lock.release()
