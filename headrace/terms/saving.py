"""A model directory that is being written while something else goes on."""

from typing import Protocol


class Saving(Protocol):
    """A model directory that is being written."""

    @property
    def done(self) -> bool:
        """Whether it is whole, or has failed."""

    def wait(self) -> None:
        """Wait until it is whole.

        Raises:
            ExportFailed: it could not be written; nothing is left of it.
        """


class Saved:
    """A model directory that is whole."""

    done = True

    def wait(self) -> None:
        """Do nothing."""
