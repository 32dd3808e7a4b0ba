"""Samples become the arrays of a token set, on a drive or in memory; `data/values/tokens.py` says how they lie there.

Invariant: a directory under its final name is complete. It is written under another name beside it, made durable, and renamed.
"""

import hashlib
import json
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from headrace.data.values.block_array import BlockChecksums, HeldArray
from headrace.data.values.tokens import ARRAYS, CHECKSUMS, FORMAT_VERSION, TokenInfo, TokenSet, checksum_of
from headrace.data.values.values import Encoded, Unmarked
from headrace.files.durable import sync
from headrace.terms.closing import Closing
from headrace.terms.errors import DataError, DiskFull, has_no_space
from headrace.terms.sizes import format_bytes

_FLUSH_TOKENS = 1 << 20
_COUNTED = (
    *("samples", "tokens", "trained_tokens"),
    *("cut_samples", "cut_tokens", "dropped_samples", "unmarked_samples"),
)


class NothingTrained(DataError):
    """All samples together have no trained token."""


class TokenWriter(Closing):
    """Writes the arrays of a token set to `files`, with a bounded number of tokens in memory. A context manager; `finish`
    completes it.
    """

    def __init__(self, files: Mapping[str, IO[bytes]], *, sequence_length: int, pad_id: int) -> None:
        self._sequence_length = sequence_length
        self._pad_id = pad_id
        self._files = files
        self._checksums = {name: BlockChecksums() for name in ARRAYS}
        self._digest = hashlib.sha256()
        self._tokens = array("i")
        self._trained = bytearray()
        self._offsets: list[int] = [0]
        self._labels: list[bool] = []
        self._largest_id = 0
        self._count, self._kinds = Counter[str](), Counter[str]()
        self._entries: list[int] = []
        self._labelled = False

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def add(self, sample: Encoded | Unmarked, kind: str, entry: int = 0) -> None:
        """Append a sample of an entry of the data, cut to `sequence_length`, unless nothing in it is left to train."""
        self._kinds[kind] += 1
        self._entries += [0] * (entry + 1 - len(self._entries))
        if isinstance(sample, Unmarked):
            self._count["unmarked_samples"] += 1
            return
        ids, trained = sample.ids, sample.trained
        cut = max(0, len(ids) - self._sequence_length) + sample.beyond
        # Nothing precedes the first token, so nothing predicts it.
        targets = [False, *trained[1 : self._sequence_length]]
        num_targets = sum(targets)
        if cut > 0:
            self._count["cut_samples"] += 1
            self._count["cut_tokens"] += cut
        if num_targets == 0:
            self._count["dropped_samples"] += 1
            return
        self._count["samples"] += 1
        self._entries[entry] += 1
        self._count["tokens"] += len(targets)
        self._count["trained_tokens"] += num_targets
        kept = ids[: self._sequence_length]
        self._largest_id = max(self._largest_id, *kept)
        self._tokens.extend(kept)
        self._trained.extend(targets)
        self._offsets.append(self._count["tokens"])
        if sample.desirable is not None:
            self._labelled = True
            self._labels.append(sample.desirable)
        if len(self._tokens) >= _FLUSH_TOKENS:
            self._flush(len(self._tokens) // 8 * 8)

    def finish(self, remarks: list[str]) -> TokenInfo:
        """Write the rest; return the record."""
        self._flush(len(self._tokens))
        return TokenInfo(
            sequence_length=self._sequence_length,
            pad_id=self._pad_id,
            digest=self._digest.hexdigest(),
            largest_id=self._largest_id,
            remarks=remarks,
            version=FORMAT_VERSION,
            kinds=dict(self._kinds),
            entries=self._entries,
            labelled=self._labelled,
            **{name: self._count[name] for name in _COUNTED},
        )

    def keep(self, directory: Path, info: TokenInfo) -> None:
        """Write the record beside the arrays, which lie in `directory`, and make everything durable."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        sums = np.concatenate([self._checksums[name].sums for name in ARRAYS]).tobytes()
        record = {"checksum": checksum_of(asdict(info), sums), "info": asdict(info)}
        for name, content in ((CHECKSUMS, sums), ("info.json", json.dumps(record, indent=1).encode())):
            (directory / name).write_bytes(content)
            sync(directory / name)

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
        partial.mkdir(parents=True)
        files = {name: (partial / name).open("wb") for name in ARRAYS}
        with TokenWriter(files, sequence_length=sequence_length, pad_id=pad_id) as writer:
            for sample in samples:
                writer.add(*sample)
            info = writer.finish(remarks())
            writer.keep(partial, info)
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


def held_tokens(
    samples: Iterable[tuple[Encoded | Unmarked, str, int]],
    *,
    sequence_length: int,
    pad_id: int,
    remarks: Callable[[], list[str]],
) -> TokenSet:
    """Return `samples`, see `write_tokens`, as a set in memory; it may hold none."""
    files = {name: BytesIO() for name in ARRAYS}
    writer = TokenWriter(files, sequence_length=sequence_length, pad_id=pad_id)
    for sample in samples:
        writer.add(*sample)
    info = writer.finish(remarks())
    tokens, bits, offsets, labels = (
        np.frombuffer(files[name].getvalue(), dtype)
        for name, dtype in zip(ARRAYS, (np.int32, np.uint8, np.int64, np.uint8), strict=True)
    )
    notices = (*info.losses, *info.remarks)
    return TokenSet(HeldArray(tokens), HeldArray(bits), offsets, info, notices, labels=labels if info.labelled else None)


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
        for name in (*ARRAYS, CHECKSUMS, "info.json"):
            (directory / name).unlink(missing_ok=True)
        directory.rmdir()
