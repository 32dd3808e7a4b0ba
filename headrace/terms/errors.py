"""Every error that Headrace raises on purpose.

    HeadraceError
      InputError(ValueError)          something the user gave: model, data, option, path, run directory
        ModelError                    model directory, configuration, architecture, weight files, tokenizer
        DataError                     samples and batches
        ConfigError                   options and units
        RunDirectoryError             a run directory that exists, is locked, or is no run
      PlanInfeasible(ValueError)      a budget is too small: tier, needed, allowed, what would fit
      StorageError(OSError)
        ShortTransfer                 path, offset, wanted, got
        CorruptData                   unit, path, offset, checksum stored and computed
        DeviceStalled(TimeoutError)   path, waited, limit
        DiskFull                      path, needed, free
        ExportFailed                  the model directory, why; needed and free where a disk is full
      PeerLost(ConnectionError)       a node or a worker is gone or silent; the committed state is untouched
        Unlike                        it sends something else than what is expected; none of it was taken
      MembershipFailed(RuntimeError)  a thread that watches over peers died; the committed state is untouched
      StepFailed(RuntimeError)        a lane of the running step failed; the committed state is untouched

Each message says what was asked, what was found and what to do. The command line turns `InputError`, `PlanInfeasible`,
`StorageError`, `PeerLost` and `MembershipFailed` into one line on stderr and exit code 2.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class HeadraceError(Exception):
    """Base of all errors raised on purpose."""


class InputError(HeadraceError, ValueError):
    """Something the user gave cannot be used as it is."""


class ModelError(InputError):
    """A model directory, configuration, architecture, weight file or tokenizer cannot be used."""


class DataError(InputError):
    """Samples or a batch cannot be used."""


class ConfigError(InputError):
    """An option, a key or a unit is not understood."""


class RunDirectoryError(InputError):
    """A run directory exists already, is locked, or is no run of this program."""


class PlanInfeasible(HeadraceError, ValueError):
    """The model and the tokens do not fit into the budgets. Raised before anything is allocated."""

    def __init__(self, message: str, *, tier: str, needed_bytes: int, allowed_bytes: int) -> None:
        super().__init__(message)
        self.tier = tier
        self.needed_bytes = needed_bytes
        self.allowed_bytes = allowed_bytes


class StorageError(HeadraceError, OSError):
    """Bytes could not be moved to or from a file."""


class ShortTransfer(StorageError):
    """A read or write moved fewer bytes than asked."""


class CorruptData(StorageError):
    """Bytes read back do not have the checksum they were written with."""


class DeviceStalled(StorageError, TimeoutError):
    """A read or write did not finish within the deadline."""


class DiskFull(StorageError):
    """A file system has less free space than needed."""


class ExportFailed(StorageError):
    """A model directory could not be written. Nothing is left there, and what it is made from is untouched."""


class PeerLost(HeadraceError, ConnectionError):
    """A node or a worker is gone, or silent for too long. What was committed is untouched."""


class Unlike(PeerLost):
    """A peer sends another type or shape than what is expected, or no message. None of it was taken."""


class MembershipFailed(HeadraceError, RuntimeError):
    """A thread that watches over peers died of what nobody expected. What was committed is untouched."""


class StepFailed(HeadraceError, RuntimeError):
    """A lane of the running step failed. Its cause is chained; the last committed state is untouched."""


def has_no_space(error: OSError) -> bool:
    """Return whether the system refuses because there is no space, or no more for this user."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def unwritten(place: object, error: OSError, then: str, *, verb: str = "written", safe: str = "") -> StorageError:
    """Return the error for a place that the system refuses to write: the cure, and what to do `then`; `safe` is not lost."""
    kind, cure = (DiskFull, "free some space") if has_no_space(error) else (StorageError, "remove the cause")
    return kind(f"{place}: cannot be {verb} ({error.strerror or error}); {safe}{cure}, then {then}")


def in_one_line(error: BaseException, most: int = 300) -> str:
    """Return the kind and the words of an error that is not ours, on one line of about `most` characters."""
    words = shortened(" ".join(str(error).split()), most)
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def shortened(words: str, most: int = 300) -> str:
    """Return the beginning of words that a file or another program chose."""
    return words if len(words) <= most else f"{words[:most]}..."


@contextmanager
def refusing(words: str) -> Iterator[None]:
    """While entered, whatever code that is not ours raises becomes a refusal: `words`, then its own in one line.

    Raises:
        ModelError: other code raised something. Errors of ours pass.
    """
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:
        raise ModelError(f"{words}: {in_one_line(error)}") from error
