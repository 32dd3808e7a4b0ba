"""One address space over several drives.

Stripes visit the files in a fixed cycle, each file as often as its weight says. So drives of unequal speed finish together.
Invariant: where a byte lies depends on weights and stripe size alone, never on the capacity. So a volume can grow at its end
without moving anything.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path

from headrace.files.block_file import BLOCK_BYTES, BlockFile, Bytes, Ticket, check_aligned
from headrace.files.threads import ThreadEngine, Transfer
from headrace.terms.errors import StorageError

# In a larger cycle a request could end before every drive has had its share.
_LARGEST_WEIGHT = 16


@dataclass(frozen=True, slots=True)
class Striping:
    """The cycle: entry `p` is the file that stripe `p` of each round goes to, and its rank among that file's stripes."""

    cycle: tuple[tuple[int, int], ...]
    weights: tuple[int, ...]
    stripe_bytes: int

    @classmethod
    def of(cls, weights: Sequence[int], stripe_bytes: int) -> "Striping":
        """Spread each file's turns evenly over the cycle (smooth weighted round robin).

        Raises:
            StorageError: a weight below 1, no weight, or a stripe that is no multiple of 4096.
        """
        if not weights or any(weight < 1 for weight in weights):
            raise StorageError(f"striping weights: expected one integer >= 1 per file, found {list(weights)}")
        if stripe_bytes < BLOCK_BYTES or stripe_bytes % BLOCK_BYTES:
            raise StorageError(f"stripe of {stripe_bytes} bytes: expected a positive multiple of {BLOCK_BYTES}")
        divisor = gcd(*weights)
        reduced = tuple(weight // divisor for weight in weights)
        credit, ranks = [0] * len(reduced), [0] * len(reduced)
        cycle: list[tuple[int, int]] = []
        for _ in range(sum(reduced)):
            credit = [held + weight for held, weight in zip(credit, reduced, strict=True)]
            turn = credit.index(max(credit))
            credit[turn] -= sum(reduced)
            cycle.append((turn, ranks[turn]))
            ranks[turn] += 1
        return cls(tuple(cycle), reduced, stripe_bytes)

    def locate(self, offset: int) -> tuple[int, int]:
        """Return `(file index, offset in that file)` of the byte at `offset`."""
        stripe, rest = divmod(offset, self.stripe_bytes)
        round_index, position = divmod(stripe, len(self.cycle))
        file_index, rank = self.cycle[position]
        return file_index, (round_index * self.weights[file_index] + rank) * self.stripe_bytes + rest

    def file_bytes(self, capacity_bytes: int) -> tuple[int, ...]:
        """Return how many bytes each file needs for `capacity_bytes` of address space."""
        stripes, rest = divmod(capacity_bytes, self.stripe_bytes)
        rounds, extra = divmod(stripes, len(self.cycle))
        needed = [rounds * weight * self.stripe_bytes for weight in self.weights]
        for file_index, _ in self.cycle[:extra]:
            needed[file_index] += self.stripe_bytes
        needed[self.cycle[extra][0]] += rest
        return tuple(needed)


class Volume:
    """A logical address space striped over `files` in proportion to `weights`; with one file, that file."""

    def __init__(self, files: Sequence[BlockFile], weights: Sequence[int], stripe_bytes: int, engine: ThreadEngine) -> None:
        if len(files) != len(weights):
            raise StorageError(f"{len(files)} files and {len(weights)} striping weights: give one weight per file")
        self.files = tuple(files)
        self._striping = Striping.of(weights, stripe_bytes)
        self._engine = engine

    @staticmethod
    def file_bytes(capacity_bytes: int, weights: Sequence[int], stripe_bytes: int) -> tuple[int, ...]:
        """Return how many bytes each file needs so that the volume holds `capacity_bytes`."""
        return Striping.of(weights, stripe_bytes).file_bytes(capacity_bytes)

    def locate(self, offset: int) -> tuple[Path, int]:
        """Return `(path, offset in that file)` of the byte at `offset`, for messages."""
        file_index, file_offset = self._striping.locate(offset)
        return self.files[file_index].path, file_offset

    def read(self, offset: int, into: Bytes) -> Ticket:
        """Start filling `into` from `offset` on.

        Raises:
            StorageError: not aligned to 4096, or beyond the end of a file.
        """
        return self.read_parts([(offset, into)])

    def read_parts(self, parts: Sequence[tuple[int, Bytes]]) -> Ticket:
        """Start filling the second of each pair from the offset on that is its first; one ticket for all. Raises as `read`."""
        return self._engine.read([transfer for offset, into in parts for transfer in self._transfers(offset, into)])

    def write(self, offset: int, data: Bytes) -> Ticket:
        """Start writing `data` at `offset`; `data` must not change before the ticket is done.

        Raises:
            StorageError: not aligned to 4096, or beyond the end of a file.
        """
        return self._engine.write(list(self._transfers(offset, data)))

    def extend(self, capacity_bytes: int) -> None:
        """Make room for `capacity_bytes` of address space.

        Raises:
            DiskFull: a file system has not that much space.
        """
        for file, needed_bytes in zip(self.files, self._striping.file_bytes(capacity_bytes), strict=True):
            file.extend(needed_bytes)

    def sync(self) -> None:
        """Return when everything written so far would survive a power cut."""
        for file in self.files:
            file.sync()

    def close(self) -> None:
        """Close the files. The engine stays."""
        for file in self.files:
            file.close()

    def _transfers(self, offset: int, buffer: Bytes) -> Iterator[Transfer]:
        start = 0
        while start < buffer.size:
            file_index, file_offset = self._striping.locate(offset + start)
            file = self.files[file_index]
            if len(self.files) == 1:
                count = buffer.size
            else:
                count = min(buffer.size - start, self._striping.stripe_bytes - (offset + start) % self._striping.stripe_bytes)
            part = buffer[start : start + count]
            check_aligned(str(file.path), file_offset, part, file.size_bytes)
            yield file, file_offset, part
            start += count


def striping_weights(bytes_per_second: Sequence[float]) -> tuple[int, ...]:
    """Return small integers in about the proportion of the measured bandwidths.

    The fastest drive gets at most 16; a drive below a thirty-second of it still gets 1.
    """
    fastest = max(bytes_per_second)
    candidates = (
        tuple(max(1, round(top * speed / fastest)) for speed in bytes_per_second) for top in range(1, _LARGEST_WEIGHT + 1)
    )

    def seconds_per_byte(weights: tuple[int, ...]) -> float:
        # The drive that is last decides; among equals the shorter cycle comes first.
        return max(weight / speed for weight, speed in zip(weights, bytes_per_second, strict=True)) / sum(weights)

    return min(candidates, key=lambda weights: (round(seconds_per_byte(weights) * fastest, 2), sum(weights)))
