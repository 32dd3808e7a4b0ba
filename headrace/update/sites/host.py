"""Apply an update rule to a range of a unit, with several threads.

Which range, when, and where its bytes come from is not here; the program decides that.

Invariant: every element of the range is updated exactly once, with the coefficients of its own group. Once `update_range`
returns or raises, no thread touches the arrays any more.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.terms.closing import Closing
from headrace.terms.cuts import HOST_ITEM_ELEMENTS, plane_lengths_of, plane_parts_of
from headrace.terms.errors import ConfigError
from headrace.terms.layout import UNIT_ALIGNMENT, GroupRange, ItemRange, Padding, PlaneSet
from headrace.terms.sizes import round_up
from headrace.update.rules.norm import square_sum
from headrace.update.rules.rule import Checksums, Chunk, StepScalars, Summing, UpdateRule, group_pieces, refuse_cut_blocks
from headrace.update.rules.tensor_rule import TensorRule, item_shares, items_rule
from headrace.update.rules.tensors import as_tensor

# Shares per thread: a thread that the system interrupts leaves its remaining shares to the others.
_SHARES_PER_THREAD = 4
# The smallest share worth handing out: about 60 microseconds of work, against a few microseconds for the hand-over.
_SMALLEST_SHARE_ELEMENTS = 64 * UNIT_ALIGNMENT
_WORD_BYTES = 8  # a checksum adds words of so many bytes


class Updater(Closing):
    """Applies `rule` with `threads` threads: the caller and `threads - 1` of its own. A context manager.

    Several threads may call `update_range` at once on different ranges; each works itself, and all share the updater's own.

    Raises:
        ConfigError: `threads` below 1.
    """

    def __init__(self, rule: UpdateRule, threads: int) -> None:
        if threads < 1:
            raise ConfigError(f"update threads: expected at least 1, found {threads}")
        self.rule = rule
        self.threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="headrace-update")

    def close(self) -> None:
        """Let running work finish and end the threads; closing twice is harmless."""
        self._pool.shutdown(wait=True)

    def warm_up(self, gradient_dtype: str) -> None:
        """Compile the rule and the norm for gradients of that NumPy type, so that the first step does not wait."""
        planes = self.rule.planes
        weight = np.zeros(UNIT_ALIGNMENT, planes.weight.dtype)
        states = tuple(np.zeros(plane.num_values(UNIT_ALIGNMENT), plane.dtype) for plane in planes.states)
        gradient = np.zeros(UNIT_ALIGNMENT, gradient_dtype)
        summing = _ShareSums(planes, UNIT_ALIGNMENT).of_share(0) if self.rule.sums else None
        if not (isinstance(self.rule, TensorRule) and self.rule.figures.takes_vectors):
            self.rule.apply(Chunk(weight, states, gradient), StepScalars(learning_rate=0.0, update=1), 0.0, 1.0, summing)
        square_sum(gradient)

    def update_range(
        self,
        chunk: Chunk[NDArray[Any]],
        step: StepScalars,
        groups: Sequence[GroupRange],
        *,
        take_checksums: bool = False,
    ) -> Checksums | None:
        """Update a chunk of a unit in place; the same bits for any `threads` and any cut of the unit.

        With `take_checksums`, return the checksums of the new weights and of the new states, laid out as in
        `PlaneSet.split_states`; None if the rule takes none.

        Shapes: all arrays are `(n,)`, a state plane has its numbers for so many elements. Types: see `UpdateRule.apply`.

        Raises: ConfigError: arrays of another length, groups that do not cover the range, or a range or group that cuts a block
            of the planes. Nothing has been changed then.
        """
        weight, states, gradient = chunk.weight, chunk.states, chunk.gradient
        planes, num_elements, start = self.rule.planes, weight.size, chunk.first_element
        stop = start + num_elements
        pieces = group_pieces(groups, start, stop)
        lengths = plane_lengths_of(planes.states, pieces, start)
        named = [(f"state {i}", s, length) for i, (s, length) in enumerate(zip(states, lengths, strict=False))]
        for name, array, length in (("weight", weight, num_elements), ("gradient", gradient, num_elements), *named):
            if array.shape != (length,):
                raise ConfigError(
                    f"update of elements [{start}, {stop}): {name} must have shape ({length},), found {array.shape}"
                )
        refuse_cut_blocks(planes, (piece.start for piece in pieces))
        in_order = self._shares(pieces, num_elements)
        shares = deque(zip(in_order, plane_parts_of(planes.states, in_order, start), strict=True))
        sums = _ShareSums(planes, num_elements) if take_checksums and self.rule.sums else None

        def work() -> None:
            while shares:
                try:
                    share, places = shares.popleft()
                except IndexError:  # another thread took the last one
                    return
                part = slice(share.start - start, share.stop - start)
                parts = tuple(state[place] for state, place in zip(states, places, strict=False))
                if isinstance(share, Padding):
                    continue
                if isinstance(share, ItemRange):
                    self._update_items(weight[part], parts, gradient[part], step, share)
                    continue
                scalars = (share.weight_decay, share.learning_rate_scale)
                summing = sums.of_share(part.start) if sums is not None else None
                of_share = Chunk(weight[part], parts, gradient[part], chunk.unit, share.start)
                self.rule.apply(of_share, step, *scalars, summing)

        futures = [self._pool.submit(work) for _ in range(min(self.threads, len(shares)) - 1)]
        try:
            work()
        finally:
            wait(futures)  # waits for all of them before an error leaves: the caller may reuse the buffers
        for future in futures:
            future.result()
        return sums.checksums() if sums is not None else None

    def _update_items(
        self,
        weight: NDArray[Any],
        states: tuple[NDArray[Any], ...],
        gradient: NDArray[Any],
        step: StepScalars,
        items: ItemRange,
    ) -> None:
        tensors = tuple(as_tensor(state) for state in states)
        items_rule(self.rule).apply_to_items(as_tensor(weight), tensors, as_tensor(gradient, bfloat16=True), step, items)

    def _shares(self, pieces: Sequence[GroupRange], num_elements: int) -> list[GroupRange]:
        """Cut `pieces` at multiples of `UNIT_ALIGNMENT` of the unit, so that no two threads write to one page. Cut rows and
        matrices into shares with small temporaries.
        """
        num_shares = 1 if self.threads == 1 else self.threads * _SHARES_PER_THREAD
        share_elements = max(round_up(-(-num_elements // num_shares), UNIT_ALIGNMENT), _SMALLEST_SHARE_ELEMENTS)
        shares: list[GroupRange] = []
        for piece in pieces:
            if isinstance(piece, Padding):
                shares.append(piece)
                continue
            if isinstance(piece, ItemRange):
                shares += item_shares(piece, HOST_ITEM_ELEMENTS)
                continue
            begin = piece.start
            while begin < piece.stop:
                end = min((begin // UNIT_ALIGNMENT * UNIT_ALIGNMENT) + share_elements, piece.stop)
                shares.append(replace(piece, start=begin, stop=end))
                begin = end
        return shares


class _ShareSums:
    """What the shares of a range add to its checksums. Whole planes lie one after another, so each begins at a known word."""

    def __init__(self, planes: PlaneSet, num_elements: int) -> None:
        self._widths = [plane.bytes_per_element for plane in (planes.weight, *planes.states)]
        self._begins = [0, *(place.start for _, place in planes.split_states(num_elements))]
        self._totals: list[NDArray[np.uint64]] = []

    def of_share(self, start: int) -> Summing:
        """Return where a share from element `start` of the range on adds. It has totals of its own, so threads do not meet."""
        places = zip(self._begins, self._widths, strict=True)
        first_words = np.array([(begin + start * width) // _WORD_BYTES for begin, width in places], np.int64)
        self._totals.append(np.zeros(2, np.uint64))
        return Summing(first_words, self._totals[-1])

    def checksums(self) -> Checksums:
        """Return the sums of all shares, modulo 2^64."""
        weights, states = (sum(int(totals[of]) for totals in self._totals) % 2**64 for of in (0, 1))
        return Checksums(weights, states)
