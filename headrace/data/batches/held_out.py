"""Samples that are not trained: which ones they are, and their rows.

Invariant: which samples are held out follows from the data, the seed and the share alone, so a resumed run holds out the same.
Every held-out sample is in exactly one row, with the marks, cuts and packing of training.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headrace.data.batches.stream import batch_of
from headrace.data.values.packing import packed_rows, single_rows
from headrace.data.values.tokens import TokenSet
from headrace.data.values.values import Batch, DataSpec
from headrace.terms.errors import DataError

# Keeps the draw apart from those of epochs, which are numbered from 0.
_DRAW = 1 << 32


def split_off(tokens: TokenSet, share: float, seed: int, together: int = 1) -> TokenSet:
    """Return the samples to train, with the others as their `held_out`. A `share` of 1 or more is a number of samples; a
    smaller one is rounded up to whole samples. So many neighbours count as one sample and stay `together`.

    Raises:
        DataError: nothing would be left to train.
    """
    samples = len(tokens) // together
    count = int(share) if share >= 1 else math.ceil(share * samples)
    if count >= samples:
        raise DataError(f"eval_split: {share:g} holds out {count} of {samples} samples, so none is trained; give a smaller one")
    order = np.random.default_rng([seed, _DRAW]).permutation(samples)
    held_out, trained = (_picked(tokens, _neighbours(np.sort(part), together)) for part in (order[:count], order[count:]))
    words = f"eval_split: {count} of {samples} samples are held out for evaluation"
    return replace(trained, held_out=replace(held_out, notices=()), notices=(*tokens.notices, words))


def _neighbours(places: NDArray[np.int64], together: int) -> NDArray[np.int64]:
    return (places[:, None] * together + np.arange(together)).ravel()


def _picked(tokens: TokenSet, indices: NDArray[np.int64]) -> TokenSet:
    """Return the samples at `indices`. Their digest is that of the data and of the choice."""
    digest = hashlib.sha256(tokens.info.digest.encode() + indices.astype("<i8").tobytes()).hexdigest()
    return replace(tokens, picked=indices, info=replace(tokens.info, digest=digest))


class HeldOutRows:
    """The rows of held-out samples, in batches of a step's size. Unpacked rows are ordered by length, because a batch is padded
    to its longest row.
    """

    def __init__(self, tokens: TokenSet, spec: DataSpec) -> None:
        self._tokens, self._spec = tokens, spec
        lengths = tokens.lengths
        if spec.packing:
            self._rows = packed_rows(lengths, spec.sequence_length, seed=None, epoch=0)
            self._order = np.arange(len(self._rows))
        else:
            self._rows = single_rows(len(tokens), seed=None, epoch=0)
            longest = lengths.reshape(-1, spec.samples_together).max(axis=1)
            self._order = _neighbours(np.argsort(longest, kind="stable"), spec.samples_together)

    def __len__(self) -> int:
        return len(self._order)

    @property
    def digest(self) -> str:
        """A digest of the samples: equal ones mean equal samples in equal order."""
        return self._tokens.info.digest

    @property
    def samples(self) -> int:
        """The number of samples."""
        return len(self._tokens)

    @property
    def num_batches(self) -> int:
        """The number of batches, and of passes over the model's weights."""
        return -(-len(self) // self._spec.rows_per_step)

    def batches(self) -> Iterator[Batch]:
        """Yield all rows once.

        Raises:
            CorruptData: the token cache is no longer what was written.
        """
        for start in range(0, len(self), self._spec.rows_per_step):
            rows = [self._rows.row(int(row)) for row in self._order[start : start + self._spec.rows_per_step]]
            yield batch_of(self._tokens, rows, self._spec)
