"""A power supply that is cut: what happens to files when a machine loses its power, at a moment that a test chooses.

A cut may lose any of the writes since the last sync, and tear one of them at any block. Each file keeps the old bytes of such
writes; the cut restores a random choice of them. A process that is killed loses less: what it wrote stays.
"""

import random
import threading
from pathlib import Path

from headrace.files import BlockFile, Bytes
from headrace.machine.host_memory import huge_page_buffer
from headrace.store import open_direct
from headrace.terms.errors import StorageError
from headrace.testing.file_around import FileAround


class PowerGone(StorageError):
    """What every operation says after the cut."""


class PowerSupply:
    """Counts writes and syncs of all files; fails at number `cut_at` and ever after."""

    def __init__(self, cut_at: int, seed: int) -> None:
        self.cut_at = cut_at
        self.random = random.Random(seed)
        self.calls = 0
        self.files: list[FragileFile] = []
        self.lock = threading.Lock()

    def draw(self) -> None:
        """Let one operation happen, or fail as everything does after the cut. Called with the lock held."""
        self.calls += 1
        if self.calls > self.cut_at:
            raise PowerGone("the power is gone")

    def cut(self) -> None:
        """Put back what the drives had not yet kept."""
        for file in self.files:
            file.lose_unsynced(self.random)

    def open_file(self, path: Path, create_bytes: int | None) -> BlockFile:
        """Open a file that hangs on this supply (as `headrace.store.open_direct`)."""
        self.files.append(FragileFile(open_direct(path, create_bytes), self))
        return self.files[-1]


class FragileFile(FileAround):
    """A `BlockFile` on a power supply, whose writes since the last sync can be lost."""

    def __init__(self, inner: BlockFile, supply: PowerSupply) -> None:
        super().__init__(inner)
        self.supply = supply
        self.unsynced: list[tuple[int, Bytes]] = []

    def read_into(self, offset: int, into: Bytes) -> None:
        """See `BlockFile.read_into`."""
        self.inner.read_into(offset, into)

    def write_from(self, offset: int, data: Bytes) -> None:
        """See `BlockFile.write_from`."""
        with self.supply.lock:
            before = huge_page_buffer(data.size)
            self.inner.read_into(offset, before)
            self.unsynced.append((offset, before))  # the very write that is cut may be on the drive in part
            if self.supply.calls <= self.supply.cut_at:
                self.inner.write_from(offset, data)
            self.supply.draw()

    def sync(self) -> None:
        """See `BlockFile.sync`."""
        with self.supply.lock:
            self.supply.draw()
            self.inner.sync()
            self.unsynced.clear()

    def close(self) -> None:
        """Stays open for `lose_unsynced`."""

    def lose_unsynced(self, chance: random.Random) -> None:
        """Put back a random choice of the blocks that were not synced, and close."""
        for offset, before in reversed(self.unsynced):
            for start in range(0, before.size, 4096):
                if chance.random() < 0.5:
                    self.inner.write_from(offset + start, before[start : start + 4096])
        self.inner.close()
