"""Numbers of every unit of a model in one file, one unit after the other.

Invariant: under its name a file is whole and never changes; a damaged unit is noticed when it is read.
"""

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.files.durable import sync
from headrace.terms.errors import CorruptData, HeadraceError, StorageError
from headrace.terms.json_text import parse_json

_LENGTH_BYTES = 8


@dataclass(frozen=True)
class NumberFile:
    """The file `path` with `counts` numbers of a NumPy `dtype`, by unit; bits of bfloat16 are `uint16`. Notes lie behind."""

    path: Path
    counts: tuple[int, ...]
    dtype: str = "float32"

    @property
    def exists(self) -> bool:
        """Whether it is there, and so whole."""
        return self.path.exists()

    @property
    def num_bytes(self) -> int:
        """Bytes of all numbers."""
        return sum(self.counts) * np.dtype(self.dtype).itemsize

    def write(self, units: Iterable[NDArray[Any]], notes: Mapping[str, Any] | None = None) -> None:
        """Write the numbers of each unit in order; see `writing`."""
        with self.writing(notes) as add:
            for unit in units:
                add(unit)

    @contextlib.contextmanager
    def writing(self, notes: Mapping[str, Any] | None = None) -> Iterator[Callable[[NDArray[Any]], None]]:
        """Give a function that takes the numbers of one unit after the other. At the end the file appears with JSON `notes`, as
        they are then; after an error there is none.

        Raises:
            StorageError: it cannot be written, or the numbers of a unit are too few or too many.
        """
        beside, sums = self.path.with_name(f"{self.path.name}.new"), list[int]()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with beside.open("wb") as file:

                def add(unit: NDArray[Any]) -> None:
                    if unit.size != self.counts[len(sums)]:
                        number, expected = len(sums), self.counts[len(sums)]
                        raise StorageError(f"{self.path}: unit {number} has {unit.size} numbers, not {expected}")
                    content = np.ascontiguousarray(unit, self.dtype).view(np.uint8).data
                    sums.append(zlib.crc32(content))
                    file.write(content)

                yield add
                if len(sums) != len(self.counts):
                    raise StorageError(f"{self.path}: {len(sums)} units were written, not {len(self.counts)}")
                end = json.dumps({"sums": sums, "notes": dict(notes or {})}).encode()
                file.write(end + len(end).to_bytes(_LENGTH_BYTES, "little"))
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self.path)
            sync(self.path.parent)
        except OSError as error:
            if isinstance(error, HeadraceError):
                raise
            raise StorageError(f"{self.path}: {error.strerror or error}") from error
        finally:
            with contextlib.suppress(OSError):
                beside.unlink()

    def read(self, unit: int) -> NDArray[Any]:
        """Return the numbers of a unit.

        Raises:
            CorruptData: they are not what was written.
        """
        width = np.dtype(self.dtype).itemsize
        start = sum(self.counts[:unit]) * width
        found = np.fromfile(self.path, self.dtype, self.counts[unit], offset=start)
        if found.size != self.counts[unit] or zlib.crc32(found.view(np.uint8).data) != self._end["sums"][unit]:
            raise CorruptData(f"{self.path}: unit {unit}, byte {start} on, is not what was written; the drive damaged it")
        return found

    @property
    def notes(self) -> dict[str, Any]:
        """What was noted with the numbers."""
        found: dict[str, Any] = self._end["notes"]
        return found

    def remove(self) -> None:
        """Remove the file, if it is there."""
        self.path.unlink(missing_ok=True)

    @cached_property
    def _end(self) -> dict[str, Any]:
        with self.path.open("rb") as file:
            file.seek(-_LENGTH_BYTES, os.SEEK_END)
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            size = file.tell()
            if length != size - _LENGTH_BYTES - self.num_bytes:
                raise CorruptData(f"{self.path}: {size} bytes, expected another number; the drive damaged it")
            file.seek(-_LENGTH_BYTES - length, os.SEEK_END)
            try:
                found: dict[str, Any] = parse_json(file.read(length))
            except ValueError as error:
                raise CorruptData(f"{self.path}: what lies behind its numbers is no note; the drive damaged it") from error
            return found
