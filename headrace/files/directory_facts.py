"""What a directory can do: its file system, its space, its speed. For striping weights, the plan's ceilings and the doctor.

Invariant: nothing is left behind in the directory, whatever happens, also to the process.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headrace.files.block_file import BLOCK_BYTES, Bytes
from headrace.files.direct import DirectFile
from headrace.files.extents import Extent, ExtentReader
from headrace.files.threads import ThreadEngine
from headrace.files.volume import striping_weights
from headrace.machine.host_memory import huge_page_buffer
from headrace.terms.errors import DiskFull, StorageError, has_no_space
from headrace.terms.sizes import MIB, round_up

_BUFFER_BYTES = 64 * MIB
_SHORT_BYTES = 64 * MIB
_IN_MEMORY = ("tmpfs", "ramfs")
_OCTAL = re.compile(r"\\([0-7]{3})")  # how the kernel writes blanks and backslashes in the names of mount points


class Bandwidth(NamedTuple):
    """Measured speeds. `mixed` is reads and writes together, while both run."""

    read_bytes_per_second: float
    write_bytes_per_second: float
    mixed_bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryFacts:
    """What is known of a directory without measuring. Facts behind the first that is false are false or 0.

    `refusal` is the system's reason why no file can be made there, or why it cannot be looked at. It is empty if a file can be
    made, or if only space is missing.
    """

    path: Path
    exists: bool
    is_directory: bool
    writable: bool
    file_system: str
    in_memory: bool
    free_bytes: int
    takes_direct: bool
    refusal: str = ""


def describe_directory(directory: Path) -> DirectoryFacts:
    """Look at `directory`: existence, writability (by making a file), file system, free space, O_DIRECT. Never raises."""
    try:
        return _described(directory)
    except OSError as error:
        return DirectoryFacts(
            path=directory,
            exists=False,
            is_directory=False,
            writable=False,
            file_system="",
            in_memory=False,
            free_bytes=0,
            takes_direct=False,
            refusal=error.strerror or str(error),
        )


def _described(directory: Path) -> DirectoryFacts:
    is_directory = directory.is_dir()
    file_system = _file_system_type(directory) if is_directory else ""
    free_bytes = 0
    takes_direct = writable = False
    refusal = ""
    if is_directory:
        status = os.statvfs(directory)
        free_bytes = status.f_bavail * status.f_frsize
        try:
            with _trial_file(directory, BLOCK_BYTES) as file:
                writable, takes_direct = True, file.direct
        except StorageError as error:
            refusal = _reason(error)
    return DirectoryFacts(
        path=directory,
        exists=directory.exists(),
        is_directory=is_directory,
        writable=writable,
        file_system=file_system,
        in_memory=file_system in _IN_MEMORY,
        free_bytes=free_bytes,
        takes_direct=takes_direct,
        refusal=refusal,
    )


def file_systems(directories: Sequence[Path]) -> tuple[int, ...]:
    """Return for each directory the index of the first that lies on the same file system: its own, unless drives are shared.

    A directory that cannot be looked at is one of its own. Never raises.
    """
    first: dict[int, int] = {}
    found = []
    for index, directory in enumerate(directories):
        try:
            found.append(first.setdefault(os.stat(directory).st_dev, index))
        except OSError:
            found.append(index)
    return tuple(found)


def on_drives_of(paths: Sequence[Path], directories: Sequence[Path]) -> bool:
    """Return whether all of `directories` are on file systems that hold some of the files."""
    return {directory.stat().st_dev for directory in directories} <= {path.stat().st_dev for path in paths}


def _reason(error: StorageError) -> str:
    cause = error.__cause__
    if not isinstance(cause, OSError):
        return str(error)
    return "" if has_no_space(cause) else cause.strerror or str(cause)


def measure_directory(directory: Path, size_bytes: int = 256 * MIB) -> Bandwidth:
    """Write, read, then do both at once, on a new file of `size_bytes` that has no name and goes when it is closed.

    Short, so a drive's cache may flatter it. Cost: three times `size_bytes` moved, 64 MiB of memory.

    Raises:
        DiskFull: less than `size_bytes` free.
        StorageError: the directory cannot be written to.
    """
    size_bytes = round_up(max(size_bytes, 2 * BLOCK_BYTES), 2 * BLOCK_BYTES)
    half_bytes = round_up(size_bytes // 2, BLOCK_BYTES)
    out, into = huge_page_buffer(min(_BUFFER_BYTES, size_bytes)), huge_page_buffer(min(_BUFFER_BYTES, size_bytes))
    out[:] = np.random.default_rng(0).integers(0, 256, out.size, dtype=np.uint8)  # some drives compress
    into[::BLOCK_BYTES] = 0  # page faults are not the drive's
    with _trial_file(directory, size_bytes) as file, ThreadEngine() as engine:
        write_seconds = _seconds_of(engine, file, write=(0, size_bytes, out))
        read_seconds = _seconds_of(engine, file, read=(0, size_bytes, into))
        mixed_seconds = _seconds_of(engine, file, read=(0, half_bytes, into), write=(half_bytes, size_bytes, out))
    return Bandwidth(size_bytes / read_seconds, size_bytes / write_seconds, size_bytes / mixed_seconds)


def stripe_shares(directories: Sequence[Path]) -> tuple[int, ...] | None:
    """Return how much of a volume each directory gets: in proportion to what it measures, reading and writing at once. Those of
    one file system, each measured alone, have to share that: each drive gets what it can do, as `Ceilings.of_directories` says.

    None where there is nothing to share out: one directory gets all, and creating the files refuses a bad one.
    """
    if len(directories) < 2 or not all(directory.is_dir() for directory in directories):
        return None
    return measured_stripes(directories).weights


class Stripes(NamedTuple):
    """How a volume is striped over directories, and its speeds: all of them at work, until the last has had its share."""

    weights: tuple[int, ...]
    read_bytes_per_second: float
    write_bytes_per_second: float


def measured_stripes(directories: Sequence[Path], size_bytes: int = _SHORT_BYTES) -> Stripes:
    """Measure directories that will do, with files of `size_bytes`. See `stripe_shares`; raises as `measure_directory`."""
    systems = file_systems(directories)
    measured = [measure_directory(each, size_bytes) for each in directories]
    sharing = [systems.count(system) for system in systems]
    weights = striping_weights([each.mixed_bytes_per_second / share for each, share in zip(measured, sharing, strict=True)])

    def speed(rates: Iterable[float]) -> float:
        return min(rate / share / weight for rate, share, weight in zip(rates, sharing, weights, strict=True)) * sum(weights)

    return Stripes(
        weights,
        speed(each.read_bytes_per_second for each in measured),
        speed(each.write_bytes_per_second for each in measured),
    )


def measured_reading(paths: Sequence[Path], size_bytes: int = _SHORT_BYTES) -> float:
    """Return the bytes per second at which files are read from their own place, all file systems at once: measured on the
    largest file of each.

    Raises:
        StorageError: a file cannot be read.
    """
    sizes: dict[int, list[tuple[int, Path]]] = {}
    for path in paths:
        status = path.stat()
        sizes.setdefault(status.st_dev, []).append((status.st_size, path))
    longest_seconds = 0.0
    for found in sizes.values():
        size, largest = max(found)
        part = huge_page_buffer(min(size_bytes, round_up(size, BLOCK_BYTES)))
        part[::BLOCK_BYTES] = 0
        with ExtentReader([largest], sink=lambda event: None) as reader:
            start_seconds = time.perf_counter()
            reader.read([Extent(largest, 0, part.size, 0)], part).wait()
            seconds = max(time.perf_counter() - start_seconds, 1e-9)
        longest_seconds = max(longest_seconds, sum(each for each, _ in found) * seconds / part.size)
    return sum(size for found in sizes.values() for size, _ in found) / longest_seconds


def _seconds_of(
    engine: ThreadEngine,
    file: DirectFile,
    *,
    read: tuple[int, int, Bytes] | None = None,
    write: tuple[int, int, Bytes] | None = None,
) -> float:
    start_seconds = time.perf_counter()
    tickets = []
    if read is not None:
        tickets.append(engine.read([(file, offset, part) for offset, part in _parts(*read)]))
    if write is not None:
        tickets.append(engine.write([(file, offset, part) for offset, part in _parts(*write)]))
    for ticket in tickets:
        ticket.wait()
    if write is not None:
        file.sync()
    return max(time.perf_counter() - start_seconds, 1e-9)


def _parts(start: int, stop: int, buffer: Bytes) -> Iterator[tuple[int, Bytes]]:
    """Cover `[start, stop)` with the same buffer over and over: its content does not matter here."""
    for offset in range(start, stop, buffer.size):
        yield offset, buffer[: min(buffer.size, stop - offset)]


@contextlib.contextmanager
def _trial_file(directory: Path, size_bytes: int) -> Iterator[DirectFile]:
    try:
        file = DirectFile.nameless(directory, size_bytes)
    except DiskFull:
        raise
    except StorageError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError):
            raise
        raise StorageError(f"{directory}: cannot create a file there: {cause.strerror}; choose a writable directory") from cause
    try:
        yield file
    finally:
        file.close()


def drive_name(directory: Path) -> str:
    """Return what distinguishes the drive of `directory` on this machine, also after a restart: what is mounted there, its file
    system and its size. Of a directory that is still to be made, where it will lie. Never raises.
    """
    there = next((path for path in (directory, *directory.parents) if path.exists()), directory)
    try:
        status = os.statvfs(there)
    except OSError:
        return str(directory)
    kind, source = _mount_of(there)
    return f"{kind} {source} {status.f_blocks * status.f_frsize}"


def _file_system_type(directory: Path) -> str:
    """Return the type of the mount that holds `directory`, as the kernel names it; empty where it does not say."""
    return _mount_of(directory)[0]


def _mount_of(directory: Path) -> tuple[str, str]:
    """Return type and source of the mount that holds `directory`, as the kernel names them; empty where it does not say."""
    try:
        lines = os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).split("\n")
    except OSError:
        return "", ""
    resolved = directory.resolve()
    best, found = -1, ("", "")
    for line in filter(None, lines):
        left, _, right = line.partition(" - ")
        mount_point = Path(_OCTAL.sub(lambda found: chr(int(found[1], 8)), left.split(" ")[4]))
        # A later mount on the same point hides the earlier one.
        if resolved.is_relative_to(mount_point) and len(mount_point.parts) >= best:
            kind, source = right.split(" ")[:2]
            best, found = len(mount_point.parts), (kind, source)
    return found
