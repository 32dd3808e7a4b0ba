"""QMoE's dictionary: 65536 sequences of ternary weights, each one 16-bit word (Frantar and Alistarh 2023, section 4).

A word of fixed length stands for 2 to 28 weights. The sequences are those that are likeliest where a weight is zero with a
given probability and both signs are equally likely. Weights go in pairs. A symbol is 0 for zero, 1 for a row's least value, 2
for its largest. The pair (first, second) has the number first + 3 * second. Every prefix and every suffix of a sequence is a
sequence, too. So the greedy parse is a shortest one, and a row may end anywhere.

Which of several equally likely sequences get in depends on the order of floating-point operations. So a dictionary is
identified by its digest, not by its probability. `QMOE_DIGEST` is that of the published one.

Words of a table (65536, 2) uint32, as published. Bits 0 to 3 of both halves hold the pairs of the whole sequence. Then come two
bits for each weight, the first 14 weights in the first half.
"""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.terms.errors import ModelError

NUM_WORDS = 1 << 16
MOST_PAIRS = 14
# Lanes of a row of the decoder's table: the 28 weights of the longest sequence, and zeros up to whole registers.
LANES = 32
# The share of zeros that the published dictionary is for, in thousandths, and the digest of its table.
QMOE_ZEROS = 885
QMOE_DIGEST = "c09862c453fe122634070a475357ff81a679aff65829d84a56f806c02a54ed45"
_PAIRS = 9
_HALF = 14


@dataclass(frozen=True, eq=False)
class Dictionary:
    """A table of `words` (65536, 2) uint32, in order of probability where zeros have a share of `zeros` thousandths."""

    zeros: int
    words: NDArray[np.uint32]
    _on_devices: dict[torch.device, torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def build(cls, zeros: int = QMOE_ZEROS) -> "Dictionary":
        """Return the dictionary for a share of zeros, by QMoE's algorithm 1, in its order of operations.

        Raises:
            ModelError: the share is not from 1 to 999 thousandths, or the result is not the published table.
        """
        if not 0 < zeros < 1000:
            raise ModelError(f"a dictionary for {zeros} zeros in a thousand weights: give 1 to 999")
        made = cls(zeros, _words_of(*_likeliest(zeros / 1000)))
        if zeros == QMOE_ZEROS and made.digest != QMOE_DIGEST:
            raise ModelError(
                f"the built dictionary has the digest {made.digest[:16]}, but QMoE's is {QMOE_DIGEST[:16]}: this machine "
                "multiplies in another order. Read the table from a file of weights instead"
            )
        return made

    @classmethod
    def from_table(cls, zeros: int, words: NDArray[np.uint32], digest: str) -> "Dictionary":
        """Return the dictionary of a stored table. `digest` was noted elsewhere.

        Raises:
            ModelError: the table is another one, or damaged.
        """
        if words.shape != (NUM_WORDS, 2) or words.dtype != np.uint32:
            raise ModelError(f"a dictionary of {words.dtype} {words.shape}: expected uint32 ({NUM_WORDS}, 2); fetch it again")
        found = cls(zeros, np.ascontiguousarray(words))
        if found.digest != digest:
            raise ModelError(
                f"the dictionary for {zeros} zeros in a thousand has the digest {found.digest[:16]}, expected was "
                f"{digest[:16]}: it is damaged, or belongs to another model. Fetch it again"
            )
        found._check()
        return found

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the table as little-endian bytes, hexadecimal."""
        return hashlib.sha256(self.words.astype("<u4").tobytes()).hexdigest()

    @cached_property
    def lengths(self) -> NDArray[np.uint8]:
        """Weights of each sequence, uint8."""
        return (2 * (self.words[:, 0] & 0xF)).astype(np.uint8)

    @cached_property
    def lanes(self) -> NDArray[np.uint8]:
        """The symbols of each sequence (65536, 32) uint8, zeros behind its end, its length in the last lane. This is what the
        decoder reads: 2 MiB, half a cache line for a word.
        """
        places = np.arange(_HALF, dtype=np.uint32) * 2 + 4
        symbols = (self.words[:, :, None] >> places) & np.uint32(3)
        lanes = np.zeros((NUM_WORDS, LANES), np.uint8)
        lanes[:, : 2 * _HALF] = symbols.reshape(NUM_WORDS, 2 * _HALF)
        lanes[:, -1] = self.lengths
        return lanes

    @cached_property
    def children(self) -> NDArray[np.int32]:
        """The word that a word becomes with one more pair (65537, 9) int32, -1 for none; the last row is the empty sequence."""
        pairs = self.lanes[:, 0 : 2 * _HALF : 2].astype(np.int64) + 3 * self.lanes[:, 1 : 2 * _HALF : 2]
        lengths = self.lengths.astype(np.int64) // 2
        children = np.full((NUM_WORDS + 1, _PAIRS), -1, np.int32)
        found = np.full(NUM_WORDS, NUM_WORDS, np.int64)  # the word of each sequence's first pairs, none so far
        for length in range(1, MOST_PAIRS + 1):
            at = np.flatnonzero(lengths == length)
            children[found[at], pairs[at, length - 1]] = at
            longer = np.flatnonzero(lengths > length)
            found[longer] = children[found[longer], pairs[longer, length - 1]]
        return children

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the table (131072,) int32 on `device`. It stays there and takes half a megabyte."""
        if (table := self._on_devices.get(device)) is None:
            table = self._on_devices[device] = torch.from_numpy(self.words.view(np.int32).reshape(-1)).to(device)
        return table

    def _check(self) -> None:
        lengths, symbols = self.words & 0xF, self.lanes[:, : 2 * _HALF]
        behind = np.arange(2 * _HALF) >= self.lengths[:, None]
        if bool((lengths[:, 0] != lengths[:, 1]).any() or (lengths[:, 0] == 0).any() or (lengths > MOST_PAIRS).any()):
            raise ModelError("a dictionary whose words have no length from 1 to 14 pairs: it is no table of QMoE's form")
        if bool((symbols > 2).any() or (symbols[behind] != 0).any()) or bool((self.children[NUM_WORDS] < 0).any()):
            raise ModelError("a dictionary with symbols above 2, behind a sequence's end, or without a pair: no QMoE table")


def _likeliest(zero: float) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """Return the likeliest sequences of 1 to 14 pairs, best first, ties in lexicographic order; and lengths.

    Sequences grow by one pair at a time; nothing that begins with a sequence outside of the likeliest can be among them. Each
    is a number whose decimal digits are its pairs plus one, so that numbers have the order of sequences.
    """
    one = [zero, (1 - zero) / 2, (1 - zero) / 2]
    pair = np.array([one[number % 3] * one[number // 3] for number in range(_PAIRS)])
    chances, keys, lengths = np.ones(1), np.zeros(1, np.int64), np.zeros(1, np.int64)
    for length in range(MOST_PAIRS):
        last = lengths == length
        longer = (chances[last, None] * pair).ravel()  # from left to right, as the algorithm multiplies
        digits = 10 ** (MOST_PAIRS - 1 - length) * np.arange(1, _PAIRS + 1)
        chances = np.concatenate([chances, longer])
        keys = np.concatenate([keys, (keys[last, None] + digits).ravel()])
        lengths = np.concatenate([lengths, np.full(longer.size, length + 1)])
        best = np.lexsort((keys, -chances))[: NUM_WORDS + 1]  # the empty sequence, the likeliest, is among them
        chances, keys, lengths = chances[best], keys[best], lengths[best]
    powers = 10 ** np.arange(MOST_PAIRS - 1, -1, -1)
    return np.maximum(keys[1:, None] // powers % 10 - 1, 0), lengths[1:].astype(np.uint32)


def _words_of(pairs: NDArray[np.int64], lengths: NDArray[np.uint32]) -> NDArray[np.uint32]:
    symbols = np.stack([pairs % 3, pairs // 3], axis=2).astype(np.uint32).reshape(NUM_WORDS, 2, _HALF)
    places = np.arange(_HALF, dtype=np.uint32) * 2 + 4
    words: NDArray[np.uint32] = (symbols << places).sum(axis=2, dtype=np.uint32) | lengths[:, None]
    return words
