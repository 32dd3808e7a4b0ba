"""What holds something that must be given back: threads, files, memory."""

from typing import Self


class Closing:
    """Base of what is used as a context manager, or closed by `close`, which subclasses define; twice does no harm."""

    def close(self) -> None:
        """Give back what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
