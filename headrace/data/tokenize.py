"""Tokenise once, find it again: the cache of token sets.

The invariant: a cached set is used only if the sources (path, size, time of change), all files of the tokenizer with its chat
template, the sequence length and the format version are those it was made from; any other combination has another name.
"""

import fcntl
import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.data.base import DataSpec, Tokenizer
from headrace.data.encode import encode_rows
from headrace.data.sources import Source, find_sources, read_rows
from headrace.data.tokens import FORMAT_VERSION, NothingTrained, TokenSet, write_tokens
from headrace.spec.errors import ConfigError, DataError, HeadraceError


def load_tokens(spec: DataSpec, tokenizer: Tokenizer, cache_dir: Path) -> TokenSet:
    """Return the samples of `spec.paths` as tokens, from below `cache_dir` if they are there, else made and kept there.

    Over-long samples are cut at `sequence_length`, samples without a trained token are left out; `TokenSet.info` counts both. A
    second process that asks for the same set waits for the first.

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
    with _locked(directory.with_suffix(".lock")):
        if directory.is_dir():
            try:
                return TokenSet.open(directory)
            except DataError:
                # Damaged from outside, since ours appear complete: it is a cache, so it is made again.
                pass
        pad_id = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
        try:
            write_tokens(directory, _samples(sources, tokenizer), sequence_length=spec.sequence_length, pad_id=pad_id)
        except NothingTrained as error:
            raise DataError(f"{', '.join(spec.paths)}: {error}") from error
    return TokenSet.open(directory)


def tokenizer_fingerprint(tokenizer: Tokenizer, beside: Path | None = None) -> str:
    """Return a hash of all files of the tokenizer, chat template included. They are written for that, into a folder in `beside`
    (default: where temporary files go) that is removed.
    """
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(prefix="tokenizer-", dir=beside) as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                content = path.read_bytes()
                digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


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
    """Turn the system's refusal of a path at, above or below `cache_dir` into words; data that cannot be read is not meant."""
    try:
        yield
    except OSError as error:
        if isinstance(error, HeadraceError) or not isinstance(error.filename, str):
            raise
        cache, path = cache_dir.absolute(), Path(error.filename).absolute()
        if not path.is_relative_to(cache) and not cache.is_relative_to(path):
            raise
        raise ConfigError(
            f"cache: {error.filename} cannot be used ({error.strerror}); choose another with cache=DIR, or for all commands "
            "with XDG_CACHE_HOME"
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The kernel lets go of the lock when the process ends, however it ends. The file stays: removing it would let two in.
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
