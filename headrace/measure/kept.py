"""Measurements of this machine, kept in the cache for later runs, under everything that the figures depend on.

Invariant: kept figures were measured on this processor or GPU, with as many cores and the same torch. They were measured for
the same dtype, on the same drives. A file that cannot be read counts as none.
"""

import contextlib
import json
import platform
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from headrace.files import drive_name
from headrace.files.durable import write_whole
from headrace.machine.cpu import CpuMachine, processor_name
from headrace.terms.errors import ConfigError
from headrace.terms.json_text import parse_json
from headrace.terms.layout import COMPUTE_DTYPES
from headrace.terms.machine.ceilings import Ceilings

_FOLDER = "machines"
_POLL_SECONDS = 0.1
# An abstract socket name, not a file: all users see it, and it vanishes with its process, however that ends.
_LOCK = "\0headrace measures this machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be known: the rate of products of `compute_dtype`, and the rates of the drives of these directories."""

    directories: tuple[Path, ...]
    compute_dtype: str

    @property
    def key(self) -> dict[str, Any]:
        """What the figures depend on, as plain JSON values."""
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return {
            "processor": [platform.machine(), processor_name()],
            "products": [dtype for dtype in COMPUTE_DTYPES if CpuMachine().multiplies(dtype)],
            "cores": torch.get_num_threads(),
            "gpu": gpus[0] if gpus else None,
            "torch": torch.__version__,
            "compute_dtype": self.compute_dtype,
            "drives": sorted(self._by_drive),
        }

    @property
    def _by_drive(self) -> dict[str, Path]:
        """The first directory on each drive, by the drive's name."""
        found: dict[str, Path] = {}
        for directory in self.directories:
            found.setdefault(drive_name(directory), directory)
        return found

    @property
    def measured(self) -> tuple[Path, ...]:
        """One directory of each drive, in the order in which their figures are kept."""
        by_drive = self._by_drive
        return tuple(by_drive[name] for name in sorted(by_drive))

    def of_directories(self, ceilings: Ceilings) -> Ceilings:
        """Return what was `measured` with a drive for each directory, as profiles have them."""
        drives = dict(zip(sorted(self._by_drive), ceilings.drives, strict=True))
        return replace(ceilings, drives=tuple(drives[drive_name(directory)] for directory in self.directories))


def find_kept(cache: Path, wanted: Wanted) -> Ceilings | None:
    """Return what was kept in `cache` for `wanted`, a drive for each of its directories; None where there is nothing."""
    key = wanted.key
    with contextlib.suppress(OSError, ValueError, RecursionError, ConfigError):
        values = parse_json(_path(cache, key).read_text(encoding="utf-8"))
        if isinstance(values, dict) and values.get("key") == key:
            return wanted.of_directories(Ceilings.from_json(values.get("ceilings")))
    return None


def keep(cache: Path, wanted: Wanted, ceilings: Ceilings) -> Path | None:
    """Keep what was measured in `wanted.measured`; return where, or None where it cannot be written."""
    key = wanted.key
    path = _path(cache, key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"key": key, "ceilings": ceilings.to_json()}, indent=2) + "\n")
        return path
    return None


@contextlib.contextmanager
def alone(wait_seconds: float, name: str = _LOCK) -> Iterator[bool]:
    """Yield whether no other process of this machine measures, after waiting at most so many seconds for others."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        until = time.monotonic() + wait_seconds
        while not (held := _binds(lock, name)) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        yield held


def _binds(lock: socket.socket, name: str) -> bool:
    try:
        lock.bind(name)
    except OSError:
        return False
    return True


def _path(cache: Path, key: dict[str, Any]) -> Path:
    return cache / _FOLDER / f"{sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"
