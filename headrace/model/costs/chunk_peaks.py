"""Peaks of live bytes on chunks of several sizes, from runs on some of them.

A run makes and frees tensors in some order. Mostly that order is the same for chunks of all sizes. Each tensor's size is a
polynomial of second degree in the tokens of the chunk, because masks grow with the square. Then three runs give all sizes.
Invariant: a peak is that of a run; or four runs had the same order, and three of them predicted all sizes of the fourth.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from headrace.model.costs.cost_meter import CostMeter

# Chunks that are run besides the first before it is known whether the others have to be run.
_TRIED = 3


def peaks_of_chunks(chunks: Sequence[int], run: Callable[[int], CostMeter]) -> dict[int, int]:
    """Return the peak of each of `chunks`, which are in rising order, after `run` on some or all of them."""
    most = len(chunks) - 1
    tried = dict.fromkeys(chunks[most * part // _TRIED] for part in range(_TRIED + 1)) if chunks else {}
    found = {tokens: run(tokens) for tokens in tried}
    peaks = {}
    for tokens in chunks:
        peak_bytes = found[tokens].peak_bytes if tokens in found else _between(found, tokens)
        peaks[tokens] = run(tokens).peak_bytes if peak_bytes is None else peak_bytes
    return peaks


def _between(known: Mapping[int, CostMeter], tokens: int) -> int | None:
    """Return the peak on a chunk of `tokens` as predicted by the `known` runs, None if they do not predict it."""
    meters = list(known.values())
    if any(meter.history != meters[0].history for meter in meters):
        return None
    sizes = []
    for samples in zip(*(meter.storages for meter in meters), strict=True):
        *points, last = zip(known, samples, strict=True)
        size = _polynomial(points, tokens)
        if size.denominator != 1 or _polynomial(points, last[0]) != last[1]:
            return None
        sizes.append(int(size))
    return meters[0].peak_bytes_of(sizes)


def _polynomial(points: Sequence[tuple[int, int]], at: int) -> Fraction:
    """Return the value `at` of the polynomial of least degree through `points` (Lagrange's form)."""
    total = Fraction(0)
    for place, value in points:
        others = [other for other, _ in points if other != place]
        total += Fraction(value * math.prod(at - other for other in others), math.prod(place - other for other in others))
    return total
