"""Tokenise once, find it again: the cache of token sets.

The invariant: a cached set is used only if its sources (path, size, time of change), tokenizer files with chat template,
sequence length and format version are the same. Any other combination has another name.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from headrace.data.chat.chat_template import asks_for_time
from headrace.data.pairs.preferences import columns_read, read, two_and_two, words_in_key
from headrace.data.read.sources import Source, find_sources
from headrace.data.tokens.encode import encode_rows
from headrace.data.tokens.token_writer import NothingTrained, write_tokens
from headrace.data.values.tokens import EARLIER_FORMATS, FORMAT_VERSION, TokenSet
from headrace.data.values.values import DataSpec, Encoded, Kind, Remark, Row, Tokenizer, Unmarked
from headrace.terms.errors import ConfigError, DataError, DiskFull, HeadraceError, ModelError, has_no_space, in_one_line
from headrace.terms.options.border import Border
from headrace.terms.sizes import format_bytes

# At most this share of conversations may be left out; more are a fault of the chat template, or of all data.
_MOST_UNMARKED_SHARE = 0.1
_TRIED_SAMPLES = 512
_UNDATED = 3  # so far, the day was not in the name
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# How the `tokenizers` library writes the system's error number into the text of a plain Exception.
_SYSTEM_NUMBER = re.compile(r"\(os error ([0-9]+)\)")


def load_tokens(spec: DataSpec, tokenizer: Tokenizer, cache_dir: Path) -> TokenSet:
    """Return the samples of `spec.paths` as tokens, from below `cache_dir` if they are there, else made and kept there.

    Over-long samples are cut at `sequence_length`; samples without a trained token are left out, and so are a few conversations
    whose turns cannot be found. `TokenSet.info` counts all of these, and `notices` are to be shown. A second process that asks
    for the same set waits for the first. If the set exists, nothing is written.

    Raises:
        ConfigError: `cache_dir` cannot be made or written to.
        DataError: unreadable or unusable data, conversations whose turns cannot be found, or no trained token in all of it.
        ModelError: the tokenizer lacks something that the data needs.
        DiskFull: no space left in `cache_dir`.
    """
    with _usable(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        return tokens_of(find_sources(spec.paths, cache_dir, spec.sequence_length), spec, tokenizer, cache_dir)


def asks_for_date(spec: DataSpec, tokenizer: Tokenizer, cache_dir: Path) -> bool:
    """Return whether the samples of `spec.paths` depend on the day: conversations, by a chat template that asks for the time.

    Raises:
        As `load_tokens`, for the first sample of each file.
    """
    if not asks_for_time(tokenizer):
        return False
    kinds = (read(source, spec.preferences)[0] for source in find_sources(spec.paths, cache_dir, spec.sequence_length))
    return any(kind in (Kind.CHAT, Kind.COMPLETION) or spec.contents for kind in kinds)


def earlier_tokens(spec: DataSpec, tokenizer: Tokenizer, cache_dir: Path) -> list[TokenSet]:
    """Return the token sets of the same data below `cache_dir` that were made by earlier rules; none is made."""
    with _usable(cache_dir):
        if not cache_dir.is_dir():
            return []
        sources = find_sources(spec.paths, cache_dir, spec.sequence_length)
        keys = (_key(sources, tokenizer, spec, cache_dir, version) for version in EARLIER_FORMATS)
        found = (_whole(cache_dir / f"tokens-{key}") for key in keys)
        return [each for each in found if isinstance(each, TokenSet)]


def tokens_of(sources: Sequence[Source], spec: DataSpec, tokenizer: Tokenizer, cache_dir: Path) -> TokenSet:
    """Return the samples of `sources` as `load_tokens` does, which finds them by `spec.paths`. Raises as that does."""
    with _usable(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        directory = cache_dir / f"tokens-{_key(sources, tokenizer, spec, cache_dir, FORMAT_VERSION)}"
        if isinstance(made := _whole(directory), TokenSet):
            return made
        with _locked(directory.with_suffix(".lock")):
            if isinstance(made := _whole(directory), TokenSet):
                return made  # the process that held the lock made it
            samples = Samples(sources, tokenizer, spec)
            length, pad_id = spec.sequence_length, pad_id_of(tokenizer)
            try:
                write_tokens(directory, samples.within_share(), sequence_length=length, pad_id=pad_id, remarks=samples.remarks)
            except NothingTrained as error:
                raise DataError(f"{', '.join(map(str, spec.paths))}: {error}") from error
        tokens = TokenSet.open(directory)
    if made is None:
        return tokens
    damaged = f"{directory}: the token cache was damaged ({made.__cause__}), and was made again"
    return replace(tokens, notices=(damaged, *tokens.notices))


def _whole(directory: Path) -> TokenSet | DataError | None:
    """Return the set in `directory`, None if there is none, or why it cannot be used. Sets appear whole, so a broken one was
    damaged from outside; as it is in a cache, it is made again.
    """
    try:
        return TokenSet.open(directory) if directory.exists() else None
    except DataError as error:
        return error


def pad_id_of(tokenizer: Tokenizer) -> int:
    """Return the token that fills rows up."""
    marks = (getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id"))
    return next((token for token in marks if token is not None), 0)


def tokenizer_fingerprint(tokenizer: Tokenizer, otherwise: Path | None = None) -> str:
    """Return a hash of all files of the tokenizer, chat template included. They are written for that into a folder that is
    removed again: where temporary files go, or, if that is impossible, in `otherwise`.

    Raises:
        OSError: the system refuses both; its `filename` is the last of them.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-tokenizer-") as folder:
            return _hash_of_files(tokenizer, Path(folder))
    except OSError:
        if otherwise is None:
            raise
    # There is one name, under a lock, so that the next process removes what a killed one left.
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
        if number is None and not isinstance(error, HeadraceError | OSError):
            raise ModelError(f"the tokenizer of the model cannot be written: {in_one_line(error)}") from error
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
    """Return why the system refused, as an errno; None if it was not the system."""
    if isinstance(error, OSError):
        return error.errno
    found = _SYSTEM_NUMBER.search(str(error))
    return int(found[1]) if found else None


def _key(sources: Sequence[Source], tokenizer: Tokenizer, spec: DataSpec, cache_dir: Path, version: int) -> str:
    parts = [
        f"{version} {spec.sequence_length}{' contents' if spec.contents else ''}{words_in_key(spec)}"
        + (" everything" if spec.everything else "")
        + ("" if spec.border is Border.APART else f" {spec.border.value}")
        + (f" {spec.template_date}" if spec.template_date and version > _UNDATED else ""),
        tokenizer_fingerprint(tokenizer, cache_dir),
        *(source.fingerprint for source in sources),
        *([f"entries {[source.entry for source in sources]}"] if spec.weights else []),  # older sets do not count them
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


class Samples:
    """The samples of `sources`, tokenised as they are asked for; afterwards, remarks about them."""

    def __init__(self, sources: Iterable[Source], tokenizer: Tokenizer, spec: DataSpec) -> None:
        self._sources, self._tokenizer = sources, tokenizer
        self._spec = spec
        self.count = self.num_unmarked = 0
        self._first_unmarked: Unmarked | None = None
        self._seen: dict[str, tuple[str, int]] = {}  # by remark: where it was first made, and how often

    def __iter__(self) -> Iterator[tuple[Encoded | Unmarked, str, int]]:
        for source in self._sources:
            kind, rows = read(source, self._spec.preferences)
            noted = self._noted(rows)
            length, day = self._spec.sequence_length, self._spec.template_date
            how = {"contents": self._spec.contents, "everything": self._spec.everything}
            encoded = encode_rows(kind, noted, self._tokenizer, length, **how, day=day, border=self._spec.border)
            for sample in two_and_two(encoded, self._spec):
                self.count += 1
                if isinstance(sample, Unmarked):
                    self.num_unmarked += 1
                    self._first_unmarked = self._first_unmarked or sample
                else:
                    self._note(sample.remarks)
                # A template that suits none of the first samples suits none at all: that is reported before hours of
                # tokenising.
                if self.num_unmarked == self.count >= _TRIED_SAMPLES:
                    raise DataError(self._too_many())
                yield sample, columns_read(kind, self._spec.preferences), source.entry

    def within_share(self) -> Iterator[tuple[Encoded | Unmarked, str, int]]:
        """Yield all samples.

        Raises:
            DataError: at the end, if too many are skipped.
        """
        yield from self
        self.refuse_unmarked(self.num_unmarked, self.count)

    def refuse_unmarked(self, unmarked: int, of: int) -> None:
        """Refuse data of which too many samples are skipped.

        Raises:
            DataError: they are.
        """
        if unmarked > _MOST_UNMARKED_SHARE * of and self._first_unmarked is not None:
            raise DataError(self._too_many())

    def remarks(self) -> list[str]:
        """Return a sentence for each remark about the samples."""
        noted = [
            f"{first}{f' and {count - 1} more' if count > 1 else ''}: {words}" for words, (first, count) in self._seen.items()
        ]
        return ([self._unmarked()] if self.num_unmarked else []) + noted

    def _noted(self, rows: Iterator[Row]) -> Iterator[Row]:
        for row in rows:
            self._note((row.place, words) for words in row.remarks)
            yield row

    def _note(self, remarks: Iterable[Remark]) -> None:
        for place, words in remarks:
            first, count = self._seen.get(words, (place, 0))
            self._seen[words] = (first, count + 1)

    def _unmarked(self) -> str:
        first = self._first_unmarked
        assert first is not None
        return (
            f"{self.num_unmarked} of {self.count} samples ({self.num_unmarked / self.count:.1%}) are skipped: the chat "
            f"template refuses them, or their assistant tokens cannot be told from the rest. The first is {first.place}: "
            f"{first.reason}"
        )

    def _too_many(self) -> str:
        return (
            f"{self._unmarked()}. More than {_MOST_UNMARKED_SHARE:.0%} are too many. Put {{% generation %}} and "
            "{% endgeneration %} around the assistant's content in the chat template, or give the data as prompt + completion"
        )


@contextmanager
def _usable(cache_dir: Path) -> Iterator[None]:
    """Turn the system's refusal of a path at, above or below `cache_dir` into words; refusals of data files pass. A lack of
    space is always the cache's, because nothing else is written.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, HeadraceError):
            raise
        if has_no_space(error):
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
    # The kernel releases the lock when the process ends, however it ends. The file stays: removing it would let two processes
    # in.
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
