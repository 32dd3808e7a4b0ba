"""Large files of the Hub, fetched so that what breaks off goes on: a part stays beside the Hub library's own files.

Invariant: a file under the library's name is whole, and has the digest that the Hub gives, where that is one of its content.
Several processes that fetch one file wait for each other.
"""

import fcntl
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from headrace.terms.errors import ModelError

_AT_ONCE = 4
_SHA256_DIGITS = 64
_PIECE_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file that is to be fetched: from where, its size, and its path in the library's cache once it is whole."""

    name: str
    url: str
    size_bytes: int
    whole: Path

    @classmethod
    def of(cls, model: str, name: str, commit: str, cache: Path) -> "RemoteFile | None":
        """Return a file of `model` as the Hub describes it; None if it does not say size and digest.

        Raises:
            Exception: the Hub's library has one for each kind of failure.
        """
        from huggingface_hub import get_hf_file_metadata, hf_hub_url  # late: most models are local
        from huggingface_hub.file_download import repo_folder_name

        url = hf_hub_url(model, name, revision=commit)
        found = get_hf_file_metadata(url)
        if found.etag is None or found.size is None:
            return None
        blobs = cache / repo_folder_name(repo_id=model, repo_type="model") / "blobs"
        return cls(name, url, found.size, blobs / found.etag)

    @property
    def part(self) -> Path:
        """Where the beginning of the file lies until it is whole."""
        return self.whole.with_name(f"{self.whole.name}.headrace-part")

    @property
    def missing_bytes(self) -> int:
        """What is still to be fetched."""
        if self.whole.exists():
            return 0
        there = self.part.stat().st_size if self.part.exists() else 0
        return self.size_bytes - there if there <= self.size_bytes else self.size_bytes


def fetch_missing(files: Sequence[RemoteFile]) -> None:
    """Fetch what is missing of `files`, some at a time.

    Raises:
        ModelError: what came is not what the Hub says.
        Exception: the Hub's library has one for each kind of failure; what came until then stays.
    """
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for fetched in [threads.submit(_fetch, file) for file in files]:
            fetched.result()


def _fetch(file: RemoteFile) -> None:
    from huggingface_hub.file_download import build_hf_headers, http_get  # type: ignore[attr-defined]

    file.part.parent.mkdir(parents=True, exist_ok=True)
    if file.whole.exists():
        return
    with file.part.open("ab") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        if file.whole.exists():
            return  # who held the lock fetched it
        there = part.seek(0, os.SEEK_END)
        if there > file.size_bytes:
            part.truncate(there := 0)
        headers = build_hf_headers()  # a redirection to another host does not get the user's token
        http_get(
            file.url, part, resume_size=there, headers=headers, expected_size=file.size_bytes, displayed_filename=file.name
        )
        part.flush()
        os.fsync(part.fileno())
        _check(file)
        file.part.replace(file.whole)


def _check(file: RemoteFile) -> None:
    if len(file.whole.name) != _SHA256_DIGITS:
        return
    digest = hashlib.sha256()
    with file.part.open("rb") as part:
        while piece := part.read(_PIECE_BYTES):
            digest.update(piece)
    if digest.hexdigest() != file.whole.name:
        file.part.unlink()
        raise ModelError(
            f"{file.name}: what was fetched has another digest than the Hub says; the same command fetches it again"
        )
