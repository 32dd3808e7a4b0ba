"""Files with a copy striped over drives: how they are recognised, where their bytes lie in the copy, and who reads these."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from headrace.files import BLOCK_BYTES, Bytes, Extent, ThreadEngine, Ticket, Volume
from headrace.terms.sizes import round_up

_SAMPLES, _SAMPLE_BYTES = 16, 16 << 10


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Files to copy, as `paths` call them; `starts` is where each begins in the copy, the last entry the copy's size."""

    paths: tuple[Path, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, paths: Sequence[Path]) -> "WeightFiles":
        """Look at the files."""
        ordered = sorted(paths, key=lambda path: str(path.resolve()))
        sizes = [round_up(path.stat().st_size, BLOCK_BYTES) for path in ordered]
        return cls(tuple(ordered), tuple(accumulate(sizes, initial=0)))

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, each rounded up to whole blocks."""
        return self.starts[-1]

    def digest(self) -> str:
        """Return what the files are told by."""
        found = hashlib.sha256()
        for path in self.paths:
            status = path.stat()
            found.update(json.dumps([str(path.resolve()), status.st_size, status.st_mtime_ns]).encode())
            with path.open("rb") as file:
                for number in range(_SAMPLES):  # times may have been set alike, as archives do
                    file.seek(number * max(0, status.st_size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                    found.update(file.read(_SAMPLE_BYTES))
        return found.hexdigest()

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        """Return where bytes `[start, stop)` of the copy lie in the files."""
        found = []
        for path, begin, end in zip(self.paths, self.starts, self.starts[1:], strict=False):
            first, last = max(start, begin), min(stop, end)
            if first < last:
                found.append(Extent(path, first - begin, last - first, first - start))
        return tuple(found)


class CopyReader:
    """Reads extents of the files from their copy, as an `ExtentReader` reads them from the files."""

    def __init__(self, files: WeightFiles, volume: Volume, engine: ThreadEngine) -> None:
        self._starts = dict(zip(files.paths, files.starts, strict=False))
        self._volume, self._engine = volume, engine

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""
        return self._engine.bytes_read

    def read(self, extents: Sequence[Extent], into: Bytes) -> Ticket:
        """Start reading `extents` to their places in `into`."""
        found = [(self._starts[each.path] + each.offset, into[each.at : each.at + each.num_bytes]) for each in extents]
        return self._volume.read_parts(found)

    def close(self) -> None:
        """End the threads and close the copy's files."""
        self._engine.close()
        self._volume.close()
