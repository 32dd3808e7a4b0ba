"""The models that are compared and the fixed tokens they are trained on.

Invariant: every contestant, in whatever Python it runs, sees the same shapes and the same tokens, so that their losses may be
compared number by number. Only NumPy is needed here, because DeepSpeed's environment imports this file too.
"""

from dataclasses import dataclass

import numpy as np

MODEL_SEED = 1234
STREAM_SEED = 7


@dataclass(frozen=True)
class Shape:
    """A Llama-architecture model with untied embedding and head, one key-value head per attention head."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int = 32000

    @property
    def parameters(self) -> int:
        """Number of parameters: embedding and head, per block seven matrices and two norms, and the final norm."""
        block = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return 2 * self.vocabulary * self.hidden + self.layers * block + self.hidden


# T is for trying out the scripts; S, M and L are the sizes that are reported (134, 374 and 1345 million parameters).
SHAPES = {
    "T": Shape(hidden=256, layers=4, heads=4, intermediate=688),
    "S": Shape(hidden=768, layers=12, heads=12, intermediate=2048),
    "M": Shape(hidden=1024, layers=24, heads=16, intermediate=2816),
    "L": Shape(hidden=2048, layers=24, heads=16, intermediate=5504),
}


class TokenStream:
    """An endless stream with something to learn: a walk on a ring of symbols whose stride is one of four, unequally likely.

    `batch(step)` depends on nothing but `step` and the constructor's arguments, so any process can ask for any step.
    """

    RING = 509  # prime: every stride visits every symbol
    STRIDES = np.array([1, 5, 31, 200])
    LIKELIHOOD = np.array([0.70, 0.15, 0.10, 0.05])

    def __init__(self, vocabulary: int, *, seed: int = STREAM_SEED) -> None:
        self._seed = seed
        # Symbols 0-2 are left to padding, begin and end of text.
        self._symbols = np.random.default_rng(seed).choice(np.arange(3, vocabulary), self.RING, replace=False)

    def batch(self, step: int, *, sequences: int, length: int) -> np.ndarray:
        """Return the tokens of `step` as int64 of shape (sequences, length)."""
        rng = np.random.default_rng((self._seed, step))
        strides = rng.choice(self.STRIDES, size=(sequences, length), p=self.LIKELIHOOD)
        strides[:, 0] = rng.integers(self.RING, size=sequences)  # where each walk starts
        return self._symbols[np.cumsum(strides, axis=1) % self.RING].astype(np.int64)
