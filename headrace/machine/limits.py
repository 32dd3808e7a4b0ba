"""What this process may still take of host memory: the kernel's estimate, and every limit that would end it earlier.

Everything is read below `root`, so that tests can build machines. Invariant: what cannot be read limits nothing; of what can be
read, the least counts. Page cache counts as free everywhere, because the kernel drops it before it refuses memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.machine.control_groups import hierarchies_of, text_of
from headrace.terms.options.budget import default_bytes

_HERE = Path("/")
_UNKNOWN_BYTES = 1 << 62
# Version 1 groups say "no limit" by a number near 2^63.
_UNLIMITED_BYTES = 1 << 60
# Of version 1 the names with `total_` count the groups below too, as its usage does.
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
# Resource limits, and the field of /proc/self/status that each counts.
_RESOURCES = {"Max address space": "VmSize", "Max data size": "VmData"}


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A control group that this process belongs to, itself or through a group below: its limit, and what is taken for good."""

    limit_bytes: int
    used_bytes: int

    @property
    def rest_bytes(self) -> int:
        """What may still be taken."""
        return max(0, self.limit_bytes - self.used_bytes)


def available_memory_bytes(root: Path = _HERE) -> int:
    """Return what this process may still take: the least of three. They are the kernel's estimate (`MemAvailable`), the rests
    of its control groups (version 2 or 1, with all above them), and the rests of `RLIMIT_AS` and `RLIMIT_DATA`.
    """
    rests = [group.rest_bytes for group in _groups(root)] + list(_resource_rests(root))
    estimate = _fields(root / "proc/meminfo").get("MemAvailable")
    return min([_UNKNOWN_BYTES if estimate is None else estimate, *rests])


def machine_memory_bytes(root: Path = _HERE) -> int:
    """Return the memory that there is for this process at all: the machine's, or what its control groups leave of it."""
    total = _fields(root / "proc/meminfo").get("MemTotal", _UNKNOWN_BYTES)
    return min([total, *(group.limit_bytes for group in _groups(root))])


def control_group_limit_bytes(root: Path = _HERE) -> int | None:
    """Return the least memory limit of this process's control groups and those above them; None for no limit."""
    return min((group.limit_bytes for group in _groups(root)), default=None)


def nearest_group(root: Path = _HERE) -> ControlGroup | None:
    """Return that control group of this process, or above it, which leaves least; None where none limits memory."""
    return min(_groups(root), key=lambda group: group.rest_bytes, default=None)


def pinnable_memory_bytes(root: Path = _HERE) -> int | None:
    """Return what a GPU's driver lets a process pin: half of the memory under WSL; None where no cap is known.

    The driver there is Windows' own, whose memory manager caps shared device memory (which pinned memory is) at half.
    """
    total = _fields(root / "proc/meminfo").get("MemTotal")
    return total // 2 if total is not None and "microsoft" in (text_of(root / "proc/version") or "").lower() else None


def usual_host_bytes(root: Path = _HERE, *, pins: bool) -> int:
    """Return the host budget where none is given. `pins`: a GPU is there, so that host buffers will be pinned."""
    allowed = default_bytes("host", available_memory_bytes(root))
    pinnable = pinnable_memory_bytes(root) if pins else None
    return allowed if pinnable is None else min(allowed, pinnable)


def _groups(root: Path) -> Iterator[ControlGroup]:
    """Yield the groups with a limit, of both versions: a machine may have the memory controller in either."""
    for version, directories in hierarchies_of("memory", root):
        if version == 2:
            yield from _limited(directories, ("memory.max", "memory.high"), "memory.current", "")
        else:
            # A group above counts only where it says so: in version 1 that was a choice once.
            counting = [
                directory
                for directory in directories
                if directory is directories[0] or text_of(directory / "memory.use_hierarchy") != "0"
            ]
            yield from _limited(counting, ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")


def _limited(directories: list[Path], limits: tuple[str, ...], usage: str, prefix: str) -> Iterator[ControlGroup]:
    for directory in directories:
        texts = [text_of(directory / name) or "" for name in limits]
        found = [int(text) for text in texts if text.isdigit() and int(text) < _UNLIMITED_BYTES]
        used = text_of(directory / usage) or ""
        if found:
            statistics = _pairs(directory / "memory.stat")
            reclaimable = sum(statistics.get(prefix + name, 0) for name in _RECLAIMABLE)
            yield ControlGroup(min(found), max(0, int(used) - reclaimable) if used.isdigit() else 0)


def _resource_rests(root: Path) -> Iterator[int]:
    status = _fields(root / "proc/self/status")
    for line in (text_of(root / "proc/self/limits") or "").splitlines():
        for name, field in _RESOURCES.items():
            soft = line.removeprefix(name).split()[0] if line.startswith(name + " ") else ""
            if soft.isdigit():
                yield max(0, int(soft) - status.get(field, 0))


def _fields(path: Path) -> dict[str, int]:
    """Return the `Name:  number kB` lines of a file, in bytes."""
    found = {}
    for line in (text_of(path) or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    return found


def _pairs(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in (text_of(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
