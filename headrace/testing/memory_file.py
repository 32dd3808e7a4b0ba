"""A file that lies in memory, for tests.

Invariant: it answers like a file on a drive, also with alignment and range errors.
"""

from pathlib import Path

import numpy as np

from headrace.files.block_file import Bytes, check_aligned


class MemoryFile:
    """A `BlockFile` of zeros, `size_bytes` long, whose path is `name`."""

    def __init__(self, size_bytes: int, name: str = "memory") -> None:
        self.path = Path(name)
        self.direct = True
        self._content: Bytes = np.zeros(size_bytes, dtype=np.uint8)

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return self._content.size

    def read_into(self, offset: int, into: Bytes) -> None:
        """See `BlockFile.read_into`."""
        check_aligned(str(self.path), offset, into, self.size_bytes)
        into[:] = self._content[offset : offset + into.size]

    def write_from(self, offset: int, data: Bytes) -> None:
        """See `BlockFile.write_from`."""
        check_aligned(str(self.path), offset, data, self.size_bytes)
        self._content[offset : offset + data.size] = data

    def extend(self, size_bytes: int) -> None:
        """See `BlockFile.extend`."""
        added_bytes = max(0, size_bytes - self.size_bytes)
        self._content = np.concatenate([self._content, np.zeros(added_bytes, dtype=np.uint8)])

    def sync(self) -> None:
        """Do nothing: nothing would survive a power cut anyway."""

    def close(self) -> None:
        """Keep the content, so that a test can open it again."""
