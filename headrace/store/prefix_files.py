"""Kept beginnings of prompts on a drive: one file for each chunk, readable by its owner alone.

    DRIVE/headrace-prefixes/NAME    a checksum, then what the chunk leaves; NAME is a digest of what it is, owner and tokens too

A file is complete or absent, and its checksum covers its name. So after a kill at any moment, of damage, or beside another
process, a file is used or passed over. Invariant: all files together have at most `most_bytes`, the least used go first.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
from collections import OrderedDict
from collections.abc import Hashable
from pathlib import Path

from headrace.terms.errors import RunDirectoryError, StorageError

FOLDER = "headrace-prefixes"
_PART, _SUM_BYTES = ".part-", hashlib.sha256().digest_size


class PrefixFiles:
    """The files in `directory` of what `identity` names: model, adapter, template, dtype, the length of chunks. Close it.

    Raises:
        StorageError: the folder cannot be made, or looked into.
    """

    def __init__(self, directory: Path, identity: str, most_bytes: int) -> None:
        self.folder, self.most_bytes, self.num_bytes = directory / FOLDER, most_bytes, 0
        self._identity, self._sizes = identity, OrderedDict[str, int]()  # the least used first
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._held = os.open(self.folder, os.O_RDONLY)
            fcntl.flock(self._held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            found = [(path.stat().st_mtime_ns, path.name, path.stat().st_size) for path in self.folder.iterdir()]
        except OSError as error:
            raise StorageError(f"prefix_ssd: {self.folder}: {error.strerror}; name another drive with --ssd") from error
        for _, name, size in sorted(found):
            self._sizes[name], self.num_bytes = size, self.num_bytes + size
        self._shrink()

    def read(self, owner: Hashable, tokens: tuple[int, ...]) -> bytes | None:
        """Return what the chunk at the end of `tokens` has left; None where it is not there, or is damaged."""
        name = self._name(owner, tokens)
        path = self.folder / name
        try:
            content = path.read_bytes()
            os.utime(path)
        except OSError:
            self._forget(name)
            return None
        if content[:_SUM_BYTES] != _sum_of(name, content[_SUM_BYTES:]):
            self._remove(name)
            return None
        self._sizes[name] = self._sizes.pop(name, len(content))
        return content[_SUM_BYTES:]

    def write(self, owner: Hashable, tokens: tuple[int, ...], content: bytes) -> bool:
        """Put a chunk there, unless it is; return whether it is. A drive that is full keeps what it has."""
        name = self._name(owner, tokens)
        path, part = self.folder / name, self.folder / f"{_PART}{secrets.token_hex(8)}"
        size = _SUM_BYTES + len(content)
        if path.exists() or size > self.most_bytes:
            return path.exists()
        self._shrink(size)
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(_sum_of(name, content) + content)
            os.replace(part, path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            return False
        self._sizes[name], self.num_bytes = size, self.num_bytes + size
        return True

    def close(self) -> None:
        """Let `headrace clean` remove them."""
        if self._held >= 0:
            os.close(self._held)
        self._held = -1

    def _name(self, owner: Hashable, tokens: tuple[int, ...]) -> str:
        return hashlib.sha256(repr((self._identity, owner, tokens)).encode()).hexdigest()

    def _shrink(self, more: int = 0) -> None:
        while self._sizes and self.num_bytes + more > self.most_bytes:
            self._remove(next(iter(self._sizes)))

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self.folder / name).unlink()
        self._forget(name)

    def _forget(self, name: str) -> None:
        self.num_bytes -= self._sizes.pop(name, 0)


def _sum_of(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + content).digest()


def remove_prefixes(folder: Path) -> None:
    """Remove the folder with all its files.

    Raises:
        RunDirectoryError: a server uses it.
    """
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    except BlockingIOError as error:
        raise RunDirectoryError(f"{folder}: a server uses it; clean when it has ended") from error
    finally:
        os.close(held)
