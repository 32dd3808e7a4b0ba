"""The control groups (cgroups, versions 1 and 2) of this process, and what they leave it of the cores.

Everything is read below `root`, so that tests can build machines. Invariant: what cannot be read limits nothing. Only the
standard library is used: threads are counted before torch is imported.
"""

from collections.abc import Iterator
from pathlib import Path

_HERE = Path("/")


def hierarchies_of(controller: str, root: Path = _HERE) -> Iterator[tuple[int, list[Path]]]:
    """Yield version and directories of each hierarchy that may have `controller`, this process's own first and then those above
    it. A machine may have it in either version.
    """
    for line in (text_of(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for top in (root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"):
                yield 2, _upwards(top, path)
        elif controller in controllers.split(","):
            for name in dict.fromkeys((controllers, controller)):
                yield 1, _upwards(root / "sys/fs/cgroup" / name, path)


def quota_cores(root: Path = _HERE) -> float | None:
    """Return the least CPU time a second of this process's control groups and those above them; None for no limit.

    Container engines set it (`docker run --cpus`, a pod's CPU limit). Affinity does not show it, so libraries start a thread
    for each of the machine's cores. The kernel then stops all of them for the rest of each period (0.1 s).
    """
    limits = [
        limit
        for version, directories in hierarchies_of("cpu", root)
        for directory in directories
        if (limit := _quota(directory, version)) is not None
    ]
    return min(limits, default=None)


def text_of(path: Path) -> str | None:
    """Return what a file of the kernel says, None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _quota(directory: Path, version: int) -> float | None:
    if version == 2:
        words = (text_of(directory / "cpu.max") or "").split()
    else:
        words = [text_of(directory / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    if len(words) != 2 or not all(word.isdigit() for word in words):  # "max", and -1 in version 1: no limit
        return None
    quota, period = map(int, words)
    return quota / period if quota and period else None


def _upwards(top: Path, path: str) -> list[Path]:
    """Return a group's directory and those above it. What is not here is left out: a container may see the host's path."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:  # outside of what this namespace shows
        parts = []
    return [directory for length in range(len(parts), -1, -1) if (directory := top.joinpath(*parts[:length])).is_dir()]
