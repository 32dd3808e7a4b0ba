"""Tokenised samples as flat arrays, in memory or mapped from a directory.

    tokens   int32, all samples one after the other
    trained  one bit for each token, eight to a byte, first token in the highest bit
    offsets  int64, samples + 1 of them: sample i is tokens[offsets[i]:offsets[i + 1]]
    labels   uint8, one for each sample if the data are labelled, else none: 1 for what is desirable

`checksums` has one checksum for each block of each of these files (`block_array.py`); `info.json` has everything else, and a
checksum of itself and of `checksums`.

The invariant: what is read from a directory is what `data/tokens/token_writer.py` wrote, or an error. The first token of a
sample is never trained, so the number of set bits is the number of targets.
"""

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.data.values.block_array import BlockArray, HeldArray, num_blocks
from headrace.data.values.values import Sample
from headrace.terms.errors import DataError

# 2: padding of given token ids is left out; 3: checksums; 4: what of a conversation is trained is compared as text.
# 5: a prompt that is a text is not used beside conversations.
FORMAT_VERSION = 5
# Versions whose files have the same form. A run that began with such tokens keeps them.
EARLIER_FORMATS = (4, 3)
ARRAYS = ("tokens", "trained", "offsets", "labels")
CHECKSUMS = "checksums"


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

    tokens: BlockArray[np.int32] | HeldArray[np.int32]
    trained_bits: BlockArray[np.uint8] | HeldArray[np.uint8]
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
            sums = (directory / CHECKSUMS).read_bytes()
            info = _read_info(directory / "info.json", sums)
            counts = (info.tokens, -(-info.tokens // 8), info.samples + 1, info.samples if info.labelled else 0)
            ends = np.cumsum([num_blocks(count * size) for count, size in zip(counts, (4, 1, 8, 1), strict=True)])
            of_tokens, of_bits, of_offsets, of_labels, more = np.split(np.frombuffer(sums, dtype=np.uint32), ends)
            if len(more):
                raise ValueError(f"{CHECKSUMS} has {len(more)} more than there are blocks")
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
    if not isinstance(record, dict) or record["checksum"] != checksum_of(record["info"], checksums):
        raise ValueError(f"{path.name} or {CHECKSUMS} is damaged")
    info = TokenInfo(**record["info"])
    if info.version not in (FORMAT_VERSION, *EARLIER_FORMATS):
        raise ValueError(f"it has format {info.version}, this version reads {FORMAT_VERSION}")
    return info


def checksum_of(info: dict[str, Any], checksums: bytes) -> int:
    """Return the checksum of a record and of the checksums beside it."""
    return zlib.crc32(json.dumps(info, sort_keys=True).encode(), zlib.crc32(checksums))
