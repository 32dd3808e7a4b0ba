"""How much may be written to SSD directories.

Invariant: nothing is reserved by asking; whoever makes the files looks again.
"""

from collections.abc import Sequence
from pathlib import Path

from headrace.ioengine.measure import describe_directory, file_systems
from headrace.spec.budget import default_bytes
from headrace.spec.ceilings import Ceilings, Drive
from headrace.spec.errors import ConfigError, StorageError


def default_ssd_bytes(ceilings: Ceilings | None, directories: Sequence[Path], *, held_bytes: int = 0) -> int | None:
    """Return what may be written to `directories`, or without any to the profile's drives: free space less 10 %.

    Data are striped in proportion to bandwidth, so the drive with the least space for its share sets the limit. Directories
    of one file system share its space. What a run's own state holds there, `held_bytes`, counts as free, and all of it may be
    written in any case: where there is no space besides, nothing else counts.

    Raises:
        ConfigError: a directory is named twice.
        StorageError: a directory is none, or not writable; or has no space, and nothing is held.
    """
    drives = ceilings.drives if ceilings is not None else ()
    if not directories:
        whole = [(drive.capacity_bytes, drive) for drive in drives]
        return _striped(whole, range(len(drives)), held_bytes) if drives else None
    spaces, seen = [], dict[tuple[int, int], Path]()
    for index, directory in enumerate(directories):
        facts = describe_directory(directory)
        full = facts.is_directory and not facts.writable and not facts.refusal
        if not facts.writable and not (full and held_bytes):
            reason = "no space; free some, or" if full else "not writable;" if facts.is_directory else "no such directory;"
            raise StorageError(f"{directory}: {reason} name another --ssd")
        status = directory.stat()
        if (twin := seen.setdefault((status.st_dev, status.st_ino), directory)) is not directory:
            raise ConfigError(f"{directory} and {twin} are the same directory; name each SSD directory once")
        spaces.append((0 if full else facts.free_bytes, drives[min(index, len(drives) - 1)] if drives else None))
    return _striped(spaces, file_systems(directories), held_bytes)


def _striped(spaces: Sequence[tuple[int, Drive | None]], systems: Sequence[int], held_bytes: int) -> int:
    """Return the budget where each directory has its share of the stripes and `systems` says which share their space."""
    rates: dict[int, float] = {}
    for (_, drive), system in zip(spaces, systems, strict=True):
        rates[system] = rates.get(system, 0.0) + (drive.mixed_bytes_per_second if drive is not None else 1.0)
    free_bytes = min(spaces[system][0] * (sum(rates.values()) / rate) for system, rate in rates.items())
    return max(held_bytes, default_bytes("ssd", int(free_bytes) + held_bytes))
