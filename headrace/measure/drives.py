"""SSD directories: how they are best kept busy, sustained reads and writes through the I/O engine, and what a commit costs.

Invariant: nothing large is left in a directory, whatever happens to the process. At most a tenth of the directory's free space
is used meanwhile.
"""

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from headrace.files import BLOCK_BYTES, DirectFile, DirectoryFacts, ThreadEngine, describe_directory
from headrace.files.scratch import remove_dead, scratch
from headrace.machine.host_memory import huge_page_buffer
from headrace.measure.loads import rates_together, seconds_taken
from headrace.terms.closing import Closing
from headrace.terms.errors import DiskFull, StorageError
from headrace.terms.machine.drives import InFlight
from headrace.terms.sizes import MIB, format_bytes

_LARGEST_FILE_BYTES = 4 << 30
_LEAST_FILE_BYTES = 64 * MIB
_FREE_SHARE = 10
_TRANSFER_BYTES = 16 * MIB
# Transfers under way at once, about as many as the engine's lanes keep; more where a drive's setting asks for more bytes.
_TRANSFERS = 4
# Settings that are tried (pieces: `docs/decisions/0003`).
_THREADS = (1, 2, 4, 8)
_PIECES_BYTES = (4 * MIB, 8 * MIB, 16 * MIB)
_TRIAL_ROUNDS = 3
# A chunk's states: 4 Mi elements of 10 bytes; reads of two chunks and writes of three are under way in a step's update.
_CHUNK_BYTES = 40 * MIB
_CHUNKS_READ, _CHUNKS_WRITTEN = 2, 3
# Figures within this of the best count as equal: repeats differ by more.
_AS_GOOD = 0.97
_GIGABYTE = 1e9
_LATENCY_REPEATS = 30
_COMMIT_REPEATS = 7
_FOLDER_PREFIX = ".headrace-bench-"


class DriveFile(Closing):
    """A file on one directory, larger than caches where there is room, for `DriveLoad`s. A context manager.

    Raises:
        StorageError: the directory cannot be written to.
        DiskFull: there is hardly any space.
    """

    def __init__(self, directory: Path, most_bytes: int = _LARGEST_FILE_BYTES) -> None:
        self.facts = _checked(directory)
        remove_leftovers(directory)
        size_bytes = min(most_bytes, self.facts.free_bytes // _FREE_SHARE) // _TRANSFER_BYTES * _TRANSFER_BYTES
        self._closers = contextlib.ExitStack()
        try:
            self._directory = directory
            # A file without a name vanishes with its process: nobody would notice gigabytes that a killed process left.
            self.file = DirectFile.nameless(directory, size_bytes)
            self._closers.callback(self.file.close)
            self.engine = self._closers.enter_context(ThreadEngine())
            self.setting: InFlight | None = None
            self.filled_bytes = size_bytes
            self._counted_from = (0.0, 0)
        except BaseException:
            self._closers.close()
            raise

    def close(self) -> None:
        """Close the file and its engine."""
        self._closers.close()

    @property
    def capacity_bytes(self) -> int:
        """Size of the file system that the directory is on."""
        status = os.statvfs(self._directory)
        return status.f_blocks * status.f_frsize

    def fill(self, seconds: float = math.inf, transfer_bytes: int = _TRANSFER_BYTES) -> None:
        """Write the whole file once, or as much of it as `seconds` allow: what was never written is not read from the drive."""
        written, whole = 0, self.file.size_bytes
        self.filled_bytes = whole  # as far as the load goes, unless time runs out
        load, begin = DriveLoad([self], write=True, transfer_bytes=transfer_bytes), time.monotonic()
        while written < whole and (not written or time.monotonic() - begin < seconds):
            written += int(load.unit())
        self.filled_bytes = min(written, whole)
        self.file.sync()

    def tune(self, seconds: float) -> InFlight:
        """Try settings for about `seconds` (each once at least), keep the best and return it."""
        chunk_bytes = min(_CHUNK_BYTES, self.filled_bytes)
        loads = [
            DriveLoad([self], write=False, transfers=_CHUNKS_READ, transfer_bytes=chunk_bytes),
            DriveLoad([self], write=True, transfers=_CHUNKS_WRITTEN, transfer_bytes=chunk_bytes),
        ]
        settings = [InFlight(threads=threads, piece_bytes=piece) for threads in _THREADS for piece in _PIECES_BYTES]
        turn_seconds = seconds / (len(settings) * _TRIAL_ROUNDS)

        def rate(setting: InFlight) -> float:
            self.engine.keep_in_flight(setting)
            return sum(rates_together(loads, turn_seconds))

        self.setting = best_setting(try_settings(settings, rate, seconds))
        self.engine.keep_in_flight(self.setting)
        self._counted_from = (self.engine.cpu_seconds, self._moved_bytes)
        return self.setting

    @property
    def cpu_seconds_per_gigabyte(self) -> float:
        """CPU seconds of the engine's threads for 10^9 bytes, over all that was moved with the chosen setting."""
        seconds, num_bytes = self._counted_from
        return (self.engine.cpu_seconds - seconds) / max(1, self._moved_bytes - num_bytes) * _GIGABYTE

    @property
    def _moved_bytes(self) -> int:
        return self.engine.bytes_read + self.engine.bytes_written

    def transfer_seconds(self) -> float:
        """Return the seconds that a read takes besides moving its bytes: the time of the smallest read through the engine."""
        block = huge_page_buffer(BLOCK_BYTES)
        offsets = _cycle(self.filled_bytes, min(_TRANSFER_BYTES, self.filled_bytes))
        return seconds_taken(lambda: self.engine.read([(self.file, next(offsets), block)]).wait(), _LATENCY_REPEATS)

    def commit_seconds(self) -> float:
        """Return the seconds that make a step durable: the flush of its data, a record, and the record's flush."""
        data = huge_page_buffer(BLOCK_BYTES)
        data[:] = 1
        # Files with names, as a store's are: for those without, some file systems (btrfs) take a shorter way.
        with scratch(self._directory, _FOLDER_PREFIX) as folder:
            record = folder / "record"
            file = DirectFile.create(folder / "data", BLOCK_BYTES)

            def commit() -> None:
                self.engine.write([(file, 0, data)]).wait()
                file.sync()
                with open(record, "wb") as record_file:
                    record_file.write(bytes(data))
                    record_file.flush()
                    os.fsync(record_file.fileno())

            try:
                return seconds_taken(commit, _COMMIT_REPEATS)
            finally:
                file.close()


class DriveLoad:
    """Reads or writes the files of drives in order, over and over, several transfers under way; direct I/O, huge pages."""

    def __init__(
        self, drives: Sequence[DriveFile], *, write: bool, transfers: int | None = None, transfer_bytes: int = _TRANSFER_BYTES
    ) -> None:
        self._drives, self._write, self._transfer_bytes = tuple(drives), write, transfer_bytes
        if transfers is None:
            settings = [drive.setting for drive in self._drives if drive.setting]
            asked = max((setting.threads * setting.piece_bytes for setting in settings), default=0)
            transfers = max(_TRANSFERS, -(-asked // transfer_bytes))
        self._buffers = [huge_page_buffer(transfer_bytes) for _ in range(transfers * len(self._drives))]
        for index, buffer in enumerate(self._buffers):
            # The bytes are random: some drives compress, and none can have seen them before.
            buffer[:] = np.random.default_rng(index).integers(0, 256, buffer.size, dtype=np.uint8)
        self._offsets = [_cycle(drive.filled_bytes, transfer_bytes) for drive in self._drives]

    def unit(self) -> float:
        """Move all buffers once; returns their bytes."""
        tickets = []
        for index, buffer in enumerate(self._buffers):
            drive, offsets = self._drives[index % len(self._drives)], self._offsets[index % len(self._drives)]
            submit = drive.engine.write if self._write else drive.engine.read
            tickets.append(submit([(drive.file, next(offsets), buffer)]))
        for ticket in tickets:
            ticket.wait()
        return float(len(self._buffers) * self._transfer_bytes)


def try_settings(
    settings: Sequence[InFlight],
    rate: Callable[[InFlight], float],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> dict[InFlight, float]:
    """Return the median of what `rate` gives for each setting, over one round of all settings, or three if `seconds` allow.

    Settings are tried round by round, so that a slow phase of the drive falls on all of them and not on one.
    """
    found: dict[InFlight, list[float]] = {setting: [] for setting in settings}
    start = clock()
    for done in range(_TRIAL_ROUNDS):
        if done and (clock() - start) * (done + 1) / done > seconds:
            break
        for setting in settings:
            found[setting].append(rate(setting))
    return {setting: statistics.median(rates) for setting, rates in found.items()}


def best_setting(rates: Mapping[InFlight, float]) -> InFlight:
    """Return the setting within 3 % of the best that costs the least CPU time: the largest pieces, and then the fewest threads.

    A step's CPU time for I/O, which compute has to do without, is proportional to the number of pieces; threads change it
    little.
    """
    enough = _AS_GOOD * max(rates.values())
    return max(
        (setting for setting, rate in rates.items() if rate >= enough),
        key=lambda setting: (setting.piece_bytes, -setting.threads),
    )


def remove_leftovers(directory: Path) -> None:
    """Remove what measurements that were killed left in `directory`: the folders that no living process holds locked."""
    remove_dead(directory, _FOLDER_PREFIX)


def _checked(directory: Path) -> DirectoryFacts:
    facts = describe_directory(directory)
    if not facts.writable:
        what = "cannot be written to" if facts.is_directory else facts.refusal or "no such directory"
        raise StorageError(f"{directory}: {what}; name a directory on the SSD that runs may use")
    if facts.free_bytes < _FREE_SHARE * _LEAST_FILE_BYTES:
        raise DiskFull(
            f"{directory}: {format_bytes(facts.free_bytes)} free, "
            f"{format_bytes(_FREE_SHARE * _LEAST_FILE_BYTES)} are needed to measure it"
        )
    return facts


def _cycle(size_bytes: int, step_bytes: int) -> Iterator[int]:
    while True:
        yield from range(0, size_bytes - step_bytes + 1, step_bytes)
