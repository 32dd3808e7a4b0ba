"""Tokenised samples as flat arrays, in memory or mapped from a directory.

    tokens   int32, all samples one after the other
    trained  one bit for each token, eight to a byte, first token in the highest bit
    offsets  int64, samples + 1 of them: sample i is tokens[offsets[i]:offsets[i + 1]]
    labels   uint8, one for each sample if the data are labelled, else none: 1 for what is desirable

`checksums` has one checksum for each block of each of these files (`block_array.py`); `info.json` has everything else, and a
checksum of itself and of `checksums`.

The invariant: a directory under its final name is complete; it is written under another name beside it, made durable, and
renamed. What is read from it is what was written, or an error. The first token of a sample is never trained, so the number of
set bits is the number of targets.
"""

import hashlib
import json
import os
import shutil
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from headrace.data.block_array import BlockArray, BlockChecksums, num_blocks
from headrace.data.values import Encoded, Sample, Unmarked
from headrace.files.durable import sync
from headrace.terms.closing import Closing
from headrace.terms.errors import DataError, DiskFull, has_no_space
from headrace.terms.sizes import format_bytes

# 2: padding of given token ids is left out; 3: checksums; 4: what of a conversation is trained is compared as text.
FORMAT_VERSION = 4
# Versions whose files have the same form. A run that began with such tokens keeps them.
EARLIER_FORMATS = (3,)
_FLUSH_TOKENS = 1 << 20
_FILES = ("tokens", "trained", "offsets", "labels")
_CHECKSUMS = "checksums"


class NothingTrained(DataError):
    """All samples together have no trained token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInfo:
    """What tokenising made, and what it left out.

    `cut_tokens` were beyond `sequence_length`, in `cut_samples` samples (an estimate for texts so long that only their
    beginnings were tokenised). `dropped_samples` had no trained token (left). `unmarked_samples` were left out: the chat
    template refuses them, or its assistant tokens cannot be told from the rest. `kinds` counts the samples that were read, by
    their columns. `remarks` are sentences for people. `digest` is of the arrays: equal digests mean equal samples in equal
    order. `largest_id` is the largest token id. `entries` counts the samples of each entry of the data; older sets lack it.
    `labelled`: each sample has a label.
    """

    sequence_length: int
    samples: int
    tokens: int
    trained_tokens: int
    cut_samples: int
    cut_tokens: int
    dropped_samples: int
    unmarked_samples: int
    pad_id: int
    kinds: dict[str, int]
    digest: str
    largest_id: int
    remarks: list[str]
    version: int
    entries: list[int] = field(default_factory=list)
    labelled: bool = False

    @property
    def losses(self) -> tuple[str, ...]:
        """What was left out of the samples, in sentences for people."""
        read, length = sum(self.kinds.values()), self.sequence_length
        share = self.cut_tokens / max(1, self.tokens + self.cut_tokens)
        cut = f"{self.cut_samples} of {read} samples are cut at sequence_length {length}: {self.cut_tokens} tokens, {share:.1%}"
        dropped = f"{self.dropped_samples} of {read} samples are dropped: none of their first {length} tokens is trained"
        return tuple(words for count, words in ((self.cut_samples, cut), (self.dropped_samples, dropped)) if count)


@dataclass(frozen=True, slots=True)
class TokenSet:
    """Samples of a data set: all, or those that are `picked`, in this order. `trained_bits` is uint8, `offsets` int64: see the
    module. `notices` are for people. `held_out` are samples of the same data set that are not to be trained. `labels` (uint8)
    are there if the data are labelled.
    """

    tokens: BlockArray[np.int32]
    trained_bits: BlockArray[np.uint8]
    offsets: NDArray[np.int64]
    info: TokenInfo
    notices: tuple[str, ...] = ()
    picked: NDArray[np.int64] | None = None
    held_out: "TokenSet | None" = None
    labels: NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1 if self.picked is None else len(self.picked)

    @property
    def ends(self) -> list[int]:
        """Where the samples of each entry of the data end; held-out ones do not count."""
        ends = np.cumsum(np.array(self.info.entries, dtype=np.int64))
        return [int(end) for end in (ends if self.picked is None else np.searchsorted(self.picked, ends))]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, shape `(samples,)`."""
        lengths = np.diff(self.offsets)
        return lengths if self.picked is None else lengths[self.picked]

    def length(self, index: int) -> int:
        """Return the tokens of sample `index`."""
        place = self._place(index)
        return int(self.offsets[place + 1] - self.offsets[place])

    def desirable(self, indices: list[int]) -> NDArray[np.bool_] | None:
        """Return the labels of samples; None if the data have none."""
        return None if self.labels is None else self.labels[[self._place(index) for index in indices]].astype(np.bool_)

    def _place(self, index: int) -> int:
        return index if self.picked is None else int(self.picked[index])

    def sample(self, index: int) -> Sample:
        """Return sample `index`.

        Raises:
            CorruptData: the files are no longer what was written.
        """
        place = self._place(index)
        start, stop = int(self.offsets[place]), int(self.offsets[place + 1])
        bits = np.unpackbits(self.trained_bits.read(start // 8, -(-stop // 8)))
        return Sample(self.tokens.read(start, stop), bits[start % 8 : start % 8 + stop - start].astype(np.bool_))

    @classmethod
    def open(cls, directory: Path) -> "TokenSet":
        """Map the arrays of `directory`. Cost: offsets are read and checked now, all else when it is used.

        Raises:
            DataError: a file is missing, damaged, of the wrong length, or of another version.
        """
        try:
            sums = (directory / _CHECKSUMS).read_bytes()
            info = _read_info(directory / "info.json", sums)
            counts = (info.tokens, -(-info.tokens // 8), info.samples + 1, info.samples if info.labelled else 0)
            ends = np.cumsum([num_blocks(count * size) for count, size in zip(counts, (4, 1, 8, 1), strict=True)])
            of_tokens, of_bits, of_offsets, of_labels, more = np.split(np.frombuffer(sums, dtype=np.uint32), ends)
            if len(more):
                raise ValueError(f"{_CHECKSUMS} has {len(more)} more than there are blocks")
            tokens = BlockArray(directory / "tokens", np.dtype(np.int32), counts[0], of_tokens)
            bits = BlockArray(directory / "trained", np.dtype(np.uint8), counts[1], of_bits)
            offsets = BlockArray(directory / "offsets", np.dtype(np.int64), counts[2], of_offsets).read(0, counts[2])
            labels = None
            if info.labelled:
                labels = BlockArray(directory / "labels", np.dtype(np.uint8), counts[3], of_labels).read(0, counts[3])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{directory}: not a complete token cache ({error}); delete the directory to tokenise again"
            ) from error
        return cls(tokens, bits, offsets, info, (*info.losses, *info.remarks), labels=labels)


def _read_info(path: Path, checksums: bytes) -> TokenInfo:
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or record["checksum"] != _checksum(record["info"], checksums):
        raise ValueError(f"{path.name} or {_CHECKSUMS} is damaged")
    info = TokenInfo(**record["info"])
    if info.version not in (FORMAT_VERSION, *EARLIER_FORMATS):
        raise ValueError(f"it has format {info.version}, this version reads {FORMAT_VERSION}")
    return info


def _checksum(info: dict[str, Any], checksums: bytes) -> int:
    return zlib.crc32(json.dumps(info, sort_keys=True).encode(), zlib.crc32(checksums))


class TokenWriter(Closing):
    """Writes a token directory, with a bounded number of tokens in memory. A context manager; `finish` completes it."""

    def __init__(self, directory: Path, *, sequence_length: int, pad_id: int) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self._sequence_length = sequence_length
        self._pad_id = pad_id
        self._files: dict[str, IO[bytes]] = {name: (directory / name).open("wb") for name in _FILES}
        self._checksums = {name: BlockChecksums() for name in _FILES}
        self._digest = hashlib.sha256()
        self._tokens = array("i")
        self._trained = bytearray()
        self._offsets: list[int] = [0]
        self._labels: list[bool] = []
        self._largest_id = 0
        self._count = _Counts()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def add(self, sample: Encoded | Unmarked, kind: str, entry: int = 0) -> None:
        """Append a sample of an entry of the data, cut to `sequence_length`, unless nothing in it is left to train."""
        self._count.kinds[kind] += 1
        self._count.entries += [0] * (entry + 1 - len(self._count.entries))
        if isinstance(sample, Unmarked):
            self._count.unmarked_samples += 1
            return
        ids, trained = sample.ids, sample.trained
        cut = max(0, len(ids) - self._sequence_length) + sample.beyond
        # Nothing precedes the first token, so nothing predicts it.
        targets = [False, *trained[1 : self._sequence_length]]
        num_targets = sum(targets)
        if cut > 0:
            self._count.cut_samples += 1
            self._count.cut_tokens += cut
        if num_targets == 0:
            self._count.dropped_samples += 1
            return
        self._count.samples += 1
        self._count.entries[entry] += 1
        self._count.tokens += len(targets)
        self._count.trained_tokens += num_targets
        kept = ids[: self._sequence_length]
        self._largest_id = max(self._largest_id, *kept)
        self._tokens.extend(kept)
        self._trained.extend(targets)
        self._offsets.append(self._count.tokens)
        if sample.desirable is not None:
            self._count.labelled = True
            self._labels.append(sample.desirable)
        if len(self._tokens) >= _FLUSH_TOKENS:
            self._flush(len(self._tokens) // 8 * 8)

    def finish(self, remarks: list[str]) -> TokenInfo:
        """Write the rest and the record, and make everything durable."""
        self._flush(len(self._tokens))
        info = TokenInfo(
            sequence_length=self._sequence_length,
            pad_id=self._pad_id,
            digest=self._digest.hexdigest(),
            largest_id=self._largest_id,
            remarks=remarks,
            version=FORMAT_VERSION,
            **(asdict(self._count) | {"kinds": dict(self._count.kinds)}),
        )
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        sums = np.concatenate([self._checksums[name].sums for name in _FILES]).tobytes()
        record = {"checksum": _checksum(asdict(info), sums), "info": asdict(info)}
        for name, content in ((_CHECKSUMS, sums), ("info.json", json.dumps(record, indent=1).encode())):
            (self._directory / name).write_bytes(content)
            sync(self._directory / name)
        return info

    def _flush(self, count: int) -> None:
        # Only whole bytes of the mask are written before the end: the next sample's bits continue where these stop.
        self._write("tokens", np.array(self._tokens[:count], dtype=np.int32))
        self._write("trained", np.packbits(np.array(self._trained[:count], dtype=np.bool_)))
        self._write("offsets", np.array(self._offsets, dtype=np.int64))
        if self._labels:
            self._write("labels", np.array(self._labels, dtype=np.uint8))
        del self._tokens[:count], self._trained[:count]
        self._offsets.clear()
        self._labels.clear()

    def _write(self, name: str, values: NDArray[np.generic]) -> None:
        content = values.tobytes()
        self._files[name].write(content)
        self._checksums[name].add(content)
        self._digest.update(name.encode() + len(values).to_bytes(8, "little") + content)


@dataclass(slots=True)
class _Counts:
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    cut_samples: int = 0
    cut_tokens: int = 0
    dropped_samples: int = 0
    unmarked_samples: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    entries: list[int] = field(default_factory=list)
    labelled: bool = False


def write_tokens(
    directory: Path,
    samples: Iterable[tuple[Encoded | Unmarked, str] | tuple[Encoded | Unmarked, str, int]],
    *,
    sequence_length: int,
    pad_id: int = 0,
    remarks: Callable[[], list[str]] = list,
) -> TokenInfo:
    """Write `samples` as the token directory `directory`, which appears complete or not at all. With each sample come its kind
    and, if there are several, the number of its entry of the data. `remarks` is called after all of them.

    Effects: makes `directory` and, while writing, a neighbour that ends in `.partial`; a failure may leave that behind.

    Raises:
        DataError: no sample has a trained token.
        DiskFull: no space left below the directory.
    """
    partial = directory.with_name(directory.name + ".partial")
    _remove(partial)
    try:
        with TokenWriter(partial, sequence_length=sequence_length, pad_id=pad_id) as writer:
            for sample in samples:
                writer.add(*sample)
            info = writer.finish(remarks())
        if info.samples == 0:
            raise NothingTrained(_nothing_trained(info))
        _remove(directory)
        partial.rename(directory)
        sync(directory.parent)
    except BaseException as error:
        _remove(partial)
        if isinstance(error, OSError) and has_no_space(error):
            raise DiskFull(_disk_full(directory)) from error
        raise
    return info


def _nothing_trained(info: TokenInfo) -> str:
    return (
        f"no token of the data set is trained: of {sum(info.kinds.values())} samples ({', '.join(info.kinds)}), "
        f"{info.dropped_samples} had no target, {info.cut_samples} of them after being cut to sequence_length "
        f"{info.sequence_length}. Raise sequence_length, or look at the samples and at the chat template"
    )


def _disk_full(directory: Path) -> str:
    free_bytes = shutil.disk_usage(directory.parent).free
    return (
        f"{directory.parent}: no space left for the token cache, which takes 4 bytes and one bit a token (now free: "
        f"{format_bytes(free_bytes)}). Make room there, or choose another cache directory"
    )


def _remove(directory: Path) -> None:
    # Only our own files are removed, one level deep: a wrong path must not cost a user more than that.
    if directory.is_dir():
        for name in (*_FILES, _CHECKSUMS, "info.json"):
            (directory / name).unlink(missing_ok=True)
        directory.rmdir()
