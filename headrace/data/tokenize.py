"""Tokenise once, find it again: the cache of token sets.

The invariant: a cached set is used only if the sources (path, size, time of change), all files of the tokenizer with its chat
template, the sequence length and the format version are those it was made from; any other combination has another name.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from headrace.data.encode import encode_rows
from headrace.data.sources import Source, find_sources, read_rows
from headrace.data.tokens import FORMAT_VERSION, NothingTrained, TokenSet, write_tokens
from headrace.data.values import DataSpec, Tokenizer
from headrace.terms.errors import ConfigError, DataError, DiskFull, HeadraceError
from headrace.terms.sizes import format_bytes

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# How the `tokenizers` library writes the system's number into the text of a plain Exception.
_SYSTEM_NUMBER = re.compile(r"\(os error ([0-9]+)\)")


def load_tokens(spec: DataSpec, tokenizer: Tokenizer, cache_dir: Path) -> TokenSet:
    """Return the samples of `spec.paths` as tokens, from below `cache_dir` if they are there, else made and kept there.

    Over-long samples are cut at `sequence_length`, samples without a trained token are left out; `TokenSet.info` counts both. A
    second process that asks for the same set waits for the first. Beside a set that is there nothing is written.

    Raises:
        ConfigError: `cache_dir` cannot be made or written to.
        DataError: unreadable or unusable data, or no trained token in all of it.
        ModelError: the tokenizer lacks what the data needs.
        DiskFull: no space left in `cache_dir`.
    """
    with _usable(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        return _load(spec, tokenizer, cache_dir)


def _load(spec: DataSpec, tokenizer: Tokenizer, cache_dir: Path) -> TokenSet:
    sources = find_sources(spec.paths, cache_dir)
    directory = cache_dir / f"tokens-{_key(sources, tokenizer, spec.sequence_length, cache_dir)}"
    if isinstance(made := _whole(directory), TokenSet):
        return made
    with _locked(directory.with_suffix(".lock")):
        if isinstance(made := _whole(directory), TokenSet):
            return made  # by the process that held the lock
        pad_id = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
        try:
            write_tokens(directory, _samples(sources, tokenizer), sequence_length=spec.sequence_length, pad_id=pad_id)
        except NothingTrained as error:
            raise DataError(f"{', '.join(spec.paths)}: {error}") from error
    tokens = TokenSet.open(directory)
    if made is None:
        return tokens
    return replace(tokens, notices=(f"{directory}: the token cache was damaged ({made.__cause__}), and was made again",))


def _whole(directory: Path) -> TokenSet | DataError | None:
    """Return the set in `directory`; None where there is none; why not, where it was damaged from outside, since ours appear
    whole: it is a cache, so that one is made again.
    """
    try:
        return TokenSet.open(directory) if directory.exists() else None
    except DataError as error:
        return error


def tokenizer_fingerprint(tokenizer: Tokenizer, otherwise: Path | None = None) -> str:
    """Return a hash of all files of the tokenizer, chat template included. They are written for that, into a folder that is
    removed: where temporary files go, and where that cannot be, in `otherwise`.

    Raises:
        OSError: the system refuses both; its `filename` is the last of them.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-tokenizer-") as folder:
            return _hash_of_files(tokenizer, Path(folder))
    except OSError:
        if otherwise is None:
            raise
    # One name and a lock, so that what a killed process left there goes with the next one.
    beside = otherwise / "tokenizer.partial"
    with _locked(otherwise / "tokenizer.lock"):
        shutil.rmtree(beside, ignore_errors=True)
        try:
            beside.mkdir()
            return _hash_of_files(tokenizer, beside)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def _hash_of_files(tokenizer: Tokenizer, folder: Path) -> str:
    try:
        tokenizer.save_pretrained(str(folder))
    except Exception as error:
        number = _system_number(error)
        if number is None or (number not in _NO_SPACE and isinstance(error, OSError) and error.filename):
            raise
        raise OSError(number, os.strerror(number), str(folder)) from error
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _system_number(error: Exception) -> int | None:
    """Return why the system refused, as an errno; None where it was not the system."""
    if isinstance(error, OSError):
        return error.errno
    found = _SYSTEM_NUMBER.search(str(error))
    return int(found[1]) if found else None


def _key(sources: Iterable[Source], tokenizer: Tokenizer, sequence_length: int, cache_dir: Path) -> str:
    parts = [
        f"{FORMAT_VERSION} {sequence_length}",
        tokenizer_fingerprint(tokenizer, cache_dir),
        *(source.fingerprint for source in sources),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _samples(sources: Iterable[Source], tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[bool], str]]:
    for source in sources:
        kind, rows = read_rows(source)
        for ids, trained in encode_rows(kind, rows, tokenizer):
            yield ids, trained, " + ".join(kind.columns)


@contextmanager
def _usable(cache_dir: Path) -> Iterator[None]:
    """Turn the system's refusal of a path at, above or below `cache_dir` into words; data that cannot be read is not meant.
    Where there is no space it is the cache's, for nothing else is written.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, HeadraceError):
            raise
        if error.errno in _NO_SPACE:
            raise DiskFull(_no_space(cache_dir)) from error
        if not isinstance(error.filename, str):
            raise
        cache, path = cache_dir.absolute(), Path(error.filename).absolute()
        if not path.is_relative_to(cache) and not cache.is_relative_to(path):
            raise
        raise ConfigError(
            f"cache: {error.filename} cannot be used ({error.strerror}); choose another with cache=DIR, or for all commands "
            "with XDG_CACHE_HOME"
        ) from error


def _no_space(cache_dir: Path) -> str:
    there = next(path for path in (cache_dir.absolute(), *cache_dir.absolute().parents) if path.exists())
    return (
        f"cache: no space left in {cache_dir} (now free: {format_bytes(shutil.disk_usage(there).free)}); make room there, or "
        "choose another with cache=DIR, or for all commands with XDG_CACHE_HOME"
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The kernel lets go of the lock when the process ends, however it ends. The file stays: removing it would let two in.
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
