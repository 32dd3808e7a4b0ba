"""A 64-bit checksum of bulk data at memory speed.

    sum over i of  weight(i) * mix(word[i])   modulo 2^64,   weight(i) = (2 i + 1) * ODD,   mix(x) = y ^ (y >> 32), y = x * MIX

`mix` is a bijection and every weight is odd, so a change of any single 64-bit word is always seen. Weights differ, so two
swapped words are seen, unless their mixed values agree in their low 63 bits less log2 of the distance. Other damage goes unseen
with a chance of about 2^-64. Measured: 34 GB/s on one core of a two-core virtual machine, as fast as summing the words.
Invariant: the compiled kernel equals the NumPy reference for every input.
"""

from typing import Any

import numpy as np
from numba.extending import register_jitable
from numpy.typing import NDArray

from headrace.machine.jit import JIT_OPTIONS, compiled, full_width

_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
_TWO = np.uint64(2)

Words = NDArray[np.uint64]


def checksum(data: NDArray[Any]) -> int:
    """Return the checksum of contiguous `data` (a multiple of 8 bytes). Releases the GIL; one pass over the data."""
    return int(_sum_words(data.reshape(-1).view(np.uint64)))


def checksum_reference(data: NDArray[Any]) -> int:
    """Return the same as `checksum`, in NumPy."""
    words: Words = data.reshape(-1).view(np.uint64)
    mixed = words * _MIX
    mixed ^= mixed >> _HALF
    weights = (np.arange(words.size, dtype=np.uint64) * _TWO + np.uint64(1)) * _ODD
    return int(np.sum(mixed * weights, dtype=np.uint64))


@register_jitable(**JIT_OPTIONS)  # type: ignore[untyped-decorator]
def add_words(words: Any, first: Any, total: Any) -> Any:
    """Return `total` plus what words `first, first + 1, ...` of a buffer add to its checksum. Loops of the update inline it."""
    full_width()
    weight = (_TWO * np.uint64(first) + np.uint64(1)) * _ODD
    step = _ODD + _ODD  # wraps, as everything here
    for index in range(words.size):
        mixed = words[index] * _MIX
        total += (mixed ^ (mixed >> _HALF)) * weight
        weight += step
    return total


@compiled
def _sum_words(words: Words) -> np.uint64:
    total: np.uint64 = add_words(words, np.uint64(0), np.uint64(0))
    return total
