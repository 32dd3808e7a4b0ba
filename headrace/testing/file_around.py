"""A file around another one, for doubles that change some of its calls."""

from pathlib import Path

from headrace.files.block_file import BlockFile, Bytes


class FileAround:
    """A `BlockFile` that hands every call on to `inner`; a subclass does some of them otherwise."""

    def __init__(self, inner: BlockFile) -> None:
        self.inner = inner
        self.path: Path = inner.path
        self.direct: bool = inner.direct

    @property
    def size_bytes(self) -> int:
        """Size of the file inside."""
        return self.inner.size_bytes

    def read_into(self, offset: int, into: Bytes) -> None:
        """See `BlockFile.read_into`."""
        self.inner.read_into(offset, into)

    def write_from(self, offset: int, data: Bytes) -> None:
        """See `BlockFile.write_from`."""
        self.inner.write_from(offset, data)

    def extend(self, size_bytes: int) -> None:
        """See `BlockFile.extend`."""
        self.inner.extend(size_bytes)

    def sync(self) -> None:
        """See `BlockFile.sync`."""
        self.inner.sync()

    def close(self) -> None:
        """See `BlockFile.close`."""
        self.inner.close()
