"""How often the samples of each source occur in an epoch: its weight.

A source of n samples gives w n of them to each epoch: the next ones of an endless walk through a fixed order. Invariant: after
any number of epochs e, each sample has occurred floor(e w) or ceil(e w) times.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import floor

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

# Keeps these orders apart from those of epochs and of held-out samples.
_DRAW = 1 << 33


def drawn(ends: Sequence[int], weights: Sequence[float], *, seed: int | None, epoch: int) -> Indices:
    """Return the samples of an epoch. Those of source i end before sample `ends[i]`; with a `seed`, a walk's order is drawn."""
    made, begin = [np.empty(0, dtype=np.int64)], 0
    for number, (end, weight) in enumerate(zip(ends, weights, strict=True)):
        samples, per_epoch = end - begin, Fraction(str(weight)) * (end - begin)
        order = np.arange(samples)
        if seed is not None:
            order = np.random.default_rng([seed, _DRAW + number]).permutation(samples)
        if samples:
            walk = np.arange(floor(per_epoch * epoch), floor(per_epoch * (epoch + 1)), dtype=np.int64)
            made.append(begin + order[walk % samples])
        begin = end
    return np.concatenate(made)
