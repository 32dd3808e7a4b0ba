"""How much may be written to SSD directories.

Invariant: asking reserves nothing; creating the files looks again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.files.directory_facts import describe_directory, file_systems
from headrace.terms.errors import ConfigError, StorageError
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.budget import default_bytes


@dataclass(frozen=True, slots=True)
class Beside:
    """What will be written to `path` while the state is on the drives, and how it is called: space is looked for, not taken."""

    what: str
    path: Path
    num_bytes: int

    @classmethod
    def models(cls, count: int, path: Path, num_bytes: int) -> "Beside":
        """Return `count` finished models of so many bytes each, of which the last will be at `path`."""
        what = "the finished model" if count == 1 else f"keeping {count} finished models"
        return cls(what, path, count * num_bytes)

    @property
    def there(self) -> Path:
        """The directory that is there and holds it, or holds what will."""
        return next(path for path in self.path.absolute().parents if path.exists())

    @property
    def device(self) -> int:
        """The number of its file system."""
        return self.there.stat().st_dev


def default_ssd_bytes(
    ceilings: Ceilings | None, directories: Sequence[Path], *, held_bytes: int = 0, beside: Beside | None = None
) -> int | None:
    """Return what may be written to `directories`, or without any to the profile's drives: free space less 10 %.

    `ceilings` are those of the directories (`Ceilings.of_directories`). Data are striped over the drives in proportion to
    bandwidth, so the one with the least space for its share sets the limit. `held_bytes`, which the run's own state holds
    there, count as free, and all of them may be written. If there is no other space, nothing else counts. What will be written
    `beside` it may fill the rest of its file system, and what is more counts as taken.

    Raises:
        ConfigError: a directory is named twice.
        StorageError: a directory is none, or not writable; or has no space, and nothing is held.
    """
    drives = ceilings.drives if ceilings is not None else ()
    if directories:
        spaces = _spaces(directories, full_will_do=held_bytes > 0, beside=beside)
    else:
        spaces = [drive.capacity_bytes for drive in drives]
    if not spaces:
        return None
    rates = [drives[min(index, len(drives) - 1)].mixed_bytes_per_second if drives else 1.0 for index in range(len(spaces))]
    free_bytes = min(space * (sum(rates) / rate) for space, rate in zip(spaces, rates, strict=True))
    return max(held_bytes, default_bytes("ssd", int(free_bytes) + held_bytes))


def _spaces(directories: Sequence[Path], *, full_will_do: bool, beside: Beside | None) -> list[int]:
    """Return the bytes that count as free on each file system that has some of `directories`, in their order."""
    spaces, seen = [], dict[tuple[int, int], Path]()
    for directory in directories:
        facts = describe_directory(directory)
        full = facts.is_directory and not facts.writable and not facts.refusal
        if not facts.writable and not (full and full_will_do):
            found = "not writable" if facts.is_directory else facts.refusal or "no such directory"
            raise StorageError(f"{directory}: {'no space; free some, or' if full else f'{found};'} name another --ssd")
        status = directory.stat()
        if (twin := seen.setdefault((status.st_dev, status.st_ino), directory)) is not directory:
            raise ConfigError(f"{directory} and {twin} are the same directory; name each SSD directory once")
        free_bytes = 0 if full else facts.free_bytes
        if beside is not None and status.st_dev == beside.device:
            rest_bytes = max(0, free_bytes - beside.num_bytes)
            free_bytes = min(free_bytes, rest_bytes * free_bytes // max(1, default_bytes("ssd", free_bytes)))
        spaces.append(free_bytes)
    return [spaces[system] for system in dict.fromkeys(file_systems(directories))]
