"""Host memory that several processes of one machine have together: a file in memory that has no name (memfd).

Nothing of it is in /dev/shm. The kernel frees it when the last process that has it ends, however that ends.
"""

import mmap
import os
from contextlib import suppress

import numpy as np

from headrace.machine.host_memory import Bytes
from headrace.terms.closing import Closing

_BLOCK_BYTES = 512  # in which the kernel counts what a file takes


class SharedMemory(Closing):
    """Zeroed memory of `num_bytes` in the file `descriptor`, on huge pages where the kernel has some for such files.

    Nothing is resident until it is touched. `content` lives as long as the array or a view of it, also after `close`.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor: int | None = descriptor
        mapping = mmap.mmap(descriptor, num_bytes)
        with suppress(OSError, AttributeError):  # a kernel without huge pages for such files
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.content: Bytes = np.frombuffer(mapping, dtype=np.uint8)

    @classmethod
    def make(cls, num_bytes: int) -> "SharedMemory":
        """Return new memory.

        Raises:
            OSError: the kernel has no such files, or no memory.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError("no files in memory on this system")
        descriptor = os.memfd_create("headrace")
        os.ftruncate(descriptor, num_bytes)
        return cls(descriptor, num_bytes)

    @classmethod
    def at(cls, address: str, num_bytes: int) -> "SharedMemory":
        """Return the memory that another process of this user has under that `address`, which has to be open there.

        Raises:
            OSError: it cannot be reached from here.
        """
        return cls(os.open(address, os.O_RDWR | os.O_CLOEXEC), num_bytes)

    @property
    def address(self) -> str:
        """Where other processes find it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def resident_bytes(self) -> int:
        """Bytes that all processes together have touched; 0 once it is closed."""
        descriptor = self._descriptor
        return 0 if descriptor is None else os.fstat(descriptor).st_blocks * _BLOCK_BYTES

    def close(self) -> None:
        """Let the file go; `content` stays as long as it is used."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
