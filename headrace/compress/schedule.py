"""Rounding a block as a program: rows pass for the inputs of matrices, which are rounded; then rows pass on as coded.

While a block computes, the next one's weights are read and the last one's codes are written. A program is one block: what it
leaves under way is the end of its file and its commit. Rows go in *lots*, of as many micro-batches as pass together.

Invariants: hidden states are written over those that the last block read, so no row passes on before that block is committed.
Numbers follow from the order of rows alone: neither lots nor groups of matrices change a bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.plan.schedules.ledger import Ledger, Snapshot
from headrace.terms.lanes import Lane
from headrace.terms.program import PIECE_SHIFT, Pool, Program, Verb, Waiting, buffer

# The pass that only sees which matrices multiply, as a rule of one row; those that add up inputs follow it, one for each group
# of matrices.
LOOK = 0
_SLOTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixGroup:
    """Matrices whose sums of inputs are in memory at once.

    Operations to add up the inputs of one token, to round the matrices, and how many weights are then encoded.
    """

    sum_flops: float = 0.0
    round_flops: float = 0.0
    weights: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFigures:
    """What a block takes: bytes that are read of it and kept of it, operations of a token's products, and its groups."""

    read_bytes: int = 0
    kept_bytes: int = 0
    token_flops: float = 0.0
    groups: Sequence[MatrixGroup] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFigures:
    """All that programs follow from: the blocks, and lots of rows that calibrate and that are held out, `lot_tokens` each.

    `ahead`: a block's weights are read while the block before it is rounded.
    """

    blocks: Sequence[BlockFigures]
    calibrating: int
    held_out: int
    lot_tokens: int = 0
    lot_bytes: int = 0
    ahead: bool = False

    @property
    def slots(self) -> int:
        """Lots of hidden states in memory on their way in, and as many on their way out."""
        return _SLOTS if self.ahead else 1


def build_block(plan: ProgramFigures, block: int, before: Snapshot) -> tuple[Program, Snapshot]:
    """Return the program that rounds `block`, and what it leaves behind. Its unit is one more than its number.

    The `micro` of an operation is a lot: those that calibrate, then the held-out ones, then these with weights as they came.
    """
    schedule = _Block(plan, block, before)
    schedule.run()
    return schedule.ledger.finish()


class _Block:
    """Emits operations in order."""

    def __init__(self, plan: ProgramFigures, block: int, before: Snapshot) -> None:
        self.plan, self.block, self.figures = plan, block, plan.blocks[block]
        self.ledger = Ledger(before)
        self._turn = 0

    def run(self) -> None:
        plan, op, unit, figures = self.plan, self.ledger.op, self.block + 1, self.figures
        weights, rounded, codes = self._fetch(self.block), buffer(Pool.ROUNDED), buffer(Pool.CODES)
        kept, file = buffer(Pool.KEPT, self.block % _SLOTS), buffer(Pool.SSD_WEIGHTS, unit)
        calibrating, held = range(plan.calibrating), range(plan.calibrating, plan.calibrating + plan.held_out)
        plain = range(held.stop, held.stop + plan.held_out)
        flops = figures.token_flops * plan.lot_tokens
        self._catch(0, LOOK, weights, 0.0, kept)  # it chooses what is coded
        if plan.ahead and self.block + 1 < len(plan.blocks):
            self._fetch(self.block + 1)
        for number, group in enumerate(figures.groups, 1):
            for lot in calibrating:
                self._catch(lot, number, weights, flops + group.sum_flops * plan.lot_tokens)
            sums = buffer(Pool.ACCUMULATOR)
            op(Verb.ROUND, Lane.COMPUTE, (weights, sums), (rounded, codes), unit=unit, chunk=number, flops=group.round_flops)
            piece = kept + (number << PIECE_SHIFT)
            op(Verb.KEEP, Lane.UPDATE, (codes,), (piece,), unit=unit, chunk=number, num_bytes=group.weights)
        for lot in plain:
            self._pass(lot, weights, flops)
        last = self.block + 1 == len(plan.blocks)
        for lot in held if last else (*calibrating, *held):
            self._pass(lot, rounded, flops)
        op(Verb.KEEP, Lane.SSD_WRITE, (kept,), (file,), unit=unit, num_bytes=figures.kept_bytes)
        freed = buffer(Pool.FREE_SLOTS)
        op(Verb.COMMIT, Lane.COMMIT, (file, buffer(Pool.HIDDEN, unit % _SLOTS)), (freed,), unit=unit)

    def _fetch(self, block: int) -> int:
        """Have a block's weights read, unless that was begun before; return where they are."""
        slot = buffer(Pool.HOST_WEIGHTS, block % self.plan.slots)
        if self.ledger.contents.get(slot) != block:
            num_bytes = self.plan.blocks[block].read_bytes
            self.ledger.op(Verb.FETCH, Lane.SSD_READ, (), (slot,), unit=block + 1, num_bytes=num_bytes)
            self.ledger.contents[slot] = block
        return slot

    def _hidden(self, lot: int) -> int:
        """Have a lot's hidden states read; return where they are."""
        into = buffer(Pool.STASH, self._turn % self.plan.slots)
        source = buffer(Pool.HIDDEN, self.block % _SLOTS) + (lot + 1 << PIECE_SHIFT)
        self._turn += 1
        self.ledger.op(Verb.IN, Lane.SSD_READ, (source,), (into,), **self._hidden_of(lot))
        return into

    def _catch(self, lot: int, number: int, weights: int, flops: float, *chosen: int) -> None:
        reads, sums = (weights, self._hidden(lot)), buffer(Pool.ACCUMULATOR)
        what = {"unit": self.block + 1, "micro": lot, "chunk": number}
        self.ledger.op(Verb.CATCH, Lane.COMPUTE, reads, (sums, *chosen), flops=flops, **what)  # type: ignore[arg-type]

    def _pass(self, lot: int, weights: int, flops: float) -> None:
        """Run a lot through the block, and write what comes out."""
        source = self._hidden(lot)
        out = buffer(Pool.PASSED, self._turn % self.plan.slots)
        unit, into = self.block + 1, buffer(Pool.HIDDEN, (self.block + 1) % _SLOTS) + (lot + 1 << PIECE_SHIFT)
        self.ledger.op(Verb.FORWARD, Lane.COMPUTE, (weights, source), (out,), unit=unit, micro=lot, flops=flops)
        self.ledger.op(Verb.OUT, Lane.SSD_WRITE, (out, buffer(Pool.FREE_SLOTS)), (into,), **self._hidden_of(lot))

    def _hidden_of(self, lot: int) -> dict[str, Any]:
        return {"unit": self.block + 1, "micro": lot, "num_bytes": self.plan.lot_bytes, "waiting": Waiting.HIDDEN}
