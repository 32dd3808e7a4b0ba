"""What the verbs of a block's program do (`schedule.py` lists its operations)."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from headrace.codec.targets import Target
from headrace.compress.block_weights import BlockByExperts, BlockWeights, WholeBlock
from headrace.compress.choosing import Coded, catch_groups, choose, most_tokens
from headrace.compress.hidden_rows import HiddenRows
from headrace.compress.room import Room
from headrace.compress.rounding import BlockCode, BlockRounder
from headrace.compress.schedule import LOOK, BlockFigures, MatrixGroup, ProgramFigures
from headrace.machine.protocol import Machine
from headrace.model import Chain, MicroBatch, WeightMap, import_unit
from headrace.model.chain.caught import CatchInputs, Enough, Matrix, times_of_each_token
from headrace.model.parts.banks import BlockExperts
from headrace.model.seats.scoring import on_device
from headrace.model.streams.stored_experts import without
from headrace.terms.layout import ParameterSpec, Plane, UnitLayout
from headrace.terms.program import Op, Pool, Verb


@dataclass(frozen=True, slots=True)
class DataRows:
    """Some rows of the data; `counts` (b, T) bool says which tokens count as inputs of a matrix. If `held_out`, none do."""

    batch: MicroBatch
    counts: torch.Tensor
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class RowPasses:
    """Rows in the order of their files: those that calibrate, the held-out ones, and these once more (`plain`), with weights
    as they came. `lots` are the numbers of the micro-batches that pass together.
    """

    rows: Sequence[DataRows]
    calibrating: range
    held_out: range
    plain: range
    lots: Sequence[Sequence[int]]

    @classmethod
    def of(cls, rows: Sequence[DataRows], together: int) -> "RowPasses":
        """Group `rows` into passes: calibration rows, then held-out rows twice, before rounding and after it. `together` is the
        most micro-batches of a lot.
        """
        calibrating, held = ([each for each in rows if each.held_out == kind] for kind in (False, True))
        first, second = len(calibrating), len(calibrating) + len(held)
        parts = range(first), range(first, second), range(second, second + len(held))
        lots = [part[start : start + together] for part in parts for start in range(0, len(part), together)]
        return cls((*calibrating, *held, *held), *parts, lots)


class Model(Protocol):
    """What is rounded, where, and in which room."""

    chain: Chain
    weights: WeightMap
    machine: Machine
    room: Room


# Called with a block, its code, and why other matrices are left: writes the block's file.
Keep = Callable[[int, BlockCode, Mapping[str, str]], None]


class CompressionWork:
    """What all blocks of a compression share.

    `files` are those of hidden states. `slots` holds hidden states by pool and slot, `came` weights by slot. `keep` and
    `commit`: see `Quantiser.run`.
    """

    def __init__(
        self,
        model: Model,
        target: Target,
        experts: Sequence[BlockExperts | None],
        plane: Plane,
        folder: Path,
        passes: RowPasses,
        *,
        experts_only: bool,
    ) -> None:
        self.chain, self.weights, self.machine, self.room = model.chain, model.weights, model.machine, model.room
        self.target, self.experts_only, self.folder, self.passes = target, experts_only, folder, passes
        self.files: list[HiddenRows] = []
        self.slots: dict[tuple[Pool, int], list[torch.Tensor]] = {}
        self.came: dict[int, torch.Tensor] = {}
        self.keep: Keep = lambda block, code, left: None
        self.commit: Callable[[int], None] = lambda block: None
        self._plane, self._experts = plane, experts

    def program_figures(self) -> ProgramFigures:
        """Return what the blocks' programs are built from: bytes to read, passes, blocks read ahead."""
        blocks, passes = range(self.chain.num_blocks), self.passes
        size = self._plane.bytes_per_element
        figures = [
            BlockFigures(read_bytes=self.layout(block).num_elements * size, groups=[MatrixGroup()] * len(self.groups(block)))
            for block in blocks
        ]
        held_out = sum(lot[0] in passes.held_out for lot in passes.lots)
        calibrating = len(passes.lots) - 2 * held_out
        return ProgramFigures(blocks=figures, calibrating=calibrating, held_out=held_out, ahead=self.room.ahead)

    def load(self, layout: UnitLayout) -> torch.Tensor:
        """Return the weights of a layout as compute reads them, flat."""
        plane = torch.empty(layout.num_elements * self._plane.bytes_per_element, dtype=torch.uint8)
        import_unit(self.weights, layout, plane.numpy().view(self._plane.dtype), None)
        return plane.view(self.chain.dtype).to(self.machine.device)

    def layout(self, block: int) -> UnitLayout:
        """Return what of a block is in memory at once: all of it, or what every token reads of a mixture."""
        layout, experts = self.chain.layouts[block + 1], self.by_experts(block)
        return layout if experts is None else without(layout, frozenset(experts.names.values()))

    def by_experts(self, block: int) -> BlockExperts | None:
        """Return a block's experts if they come one at a time."""
        return self._experts[block] if self.room.by_experts else None

    def groups(self, block: int) -> Sequence[Sequence[Matrix]]:
        """Return the matrices of a block that can be coded, in groups whose sums of inputs are in memory at once."""
        specs = self.chain.layouts[block + 1].parameters
        every = {Matrix(spec.name, None, (0, 0)): 1 for spec in specs}
        coded, _ = choose(self.weights, specs, every, self.target, experts_only=self.experts_only)
        return catch_groups(coded, self.room.sums_bytes)


class BlockRun:
    """One block under way: performs the operations of its program.

    Raises:
        ModelError: an input of a matrix is not finite.
    """

    def __init__(self, work: CompressionWork, block: int) -> None:
        self._work, self._block = work, block
        self._groups = work.groups(block)
        self._weights: BlockWeights | None = None
        self._rounded: bool | None = None  # which weights are bound
        self._rounder: BlockRounder | None = None
        self._mode = CatchInputs({}, ())
        self._coded: dict[str, Coded] = {}
        self._left: dict[str, str] = {}
        self._most: dict[str, int] = {}
        self._seen: dict[Matrix, int] = {}
        self._looked_at = 0  # tokens in which that was seen

    def perform(self, op: Op) -> None:
        """Perform an operation of the block, or one that reads the next block's weights."""
        _HANDLERS[op.verb](self, op)

    def close(self) -> None:
        """Release the weights."""
        if self._weights is not None:
            self._weights.close()
        self._weights = None

    def _fetch(self, op: Op) -> None:
        work = self._work
        work.came[op.slot(Pool.HOST_WEIGHTS)] = work.load(work.layout(op.unit - 1))

    def _read_hidden(self, op: Op) -> None:
        rows = self._work.files[self._block % 2]
        self._work.slots[Pool.STASH, op.slot(Pool.STASH)] = [rows.read(index) for index in self._work.passes.lots[op.micro]]

    def _write_hidden(self, op: Op) -> None:
        rows, made = self._work.files[(self._block + 1) % 2], self._work.slots.pop((Pool.PASSED, op.slot(Pool.PASSED)))
        for index, hidden in zip(self._work.passes.lots[op.micro], made, strict=True):
            rows.write(index, hidden)

    def _catch(self, op: Op) -> None:
        """Add up the inputs of a group; at first, only see which matrices multiply, and so which are coded."""
        if op.chunk == LOOK:
            self._open(op)
            self._look(op)
            return
        weights, rows = self._bound(rounded=False), self._work.passes.rows
        if op.micro == 0:
            wanted = [matrix for matrix in self._groups[op.chunk - 1] if matrix.name in self._coded]
            times = times_of_each_token(wanted, self._seen, self._looked_at)
            self._mode = CatchInputs(weights.places, wanted, lambda matrix: self._most.get(matrix.name), times)
        mode, block = self._mode, self._run_of(op)
        experts = frozenset(matrix.expert for matrix in mode.wanted if matrix.expert is not None)

        def run(index: int) -> torch.Tensor:
            try:
                return block(index)
            except Enough:
                return torch.empty(0, dtype=torch.float32)

        if mode.wanted:
            lot = self._work.passes.lots[op.micro]
            weights.run(lot, run, lambda index: mode.of_rows(rows[index].counts), lambda index, out: None, experts)

    def _open(self, op: Op) -> None:
        work, unit = self._work, self._block + 1
        came, experts = work.came.pop(op.slot(Pool.HOST_WEIGHTS)), work.by_experts(self._block)
        if experts is None:
            self._weights = WholeBlock(work.chain, unit, came)
        else:
            self._weights = BlockByExperts(work.chain, work.weights, unit, experts, came, work.folder / "rounded")

    def _look(self, op: Op) -> None:
        """See which matrices multiply a row; where that misses some, such as rare experts, all rows of a micro-batch."""
        specs = self._work.chain.layouts[self._block + 1].parameters
        self._see(op, slice(1))
        if {spec.name for spec in specs if len(spec.shape) > 1} - {matrix.name for matrix in self._seen}:
            self._see(op, slice(None))
        self._choose(specs)

    def _see(self, op: Op, cut: slice) -> None:
        weights, first = self._bound(rounded=False), self._work.passes.lots[op.micro][:1]
        mode, counts = CatchInputs(weights.places, ()), self._work.passes.rows[first[0]].counts[cut]
        weights.run(first, self._run_of(op, cut), lambda index: mode.of_rows(counts), lambda index, out: None)
        self._seen, self._looked_at = mode.seen, counts.numel()

    def _choose(self, specs: Sequence[ParameterSpec]) -> None:
        work, weights = self._work, self._bound(rounded=False)
        coded, self._left = choose(work.weights, specs, self._seen, work.target, experts_only=work.experts_only)
        self._coded = {parameter.spec.name: parameter for parameter in coded}
        tokens = sum(int(work.passes.rows[index].counts.sum()) for index in work.passes.calibrating)
        self._most = most_tokens(coded, self._seen, tokens, self._looked_at)
        self._rounder = BlockRounder(work.weights, weights.rounded, work.target, work.room.sums_bytes)

    def _round(self, op: Op) -> None:
        assert self._rounder is not None, "what is coded was chosen"
        caught, matrices = self._mode.caught, [each for each in self._groups[op.chunk - 1] if each.name in self._coded]
        for name in dict.fromkeys(matrix.name for matrix in matrices):
            self._rounder.round(self._coded[name], [matrix for matrix in matrices if matrix.name == name], caught)
        self._mode = CatchInputs({}, ())  # its sums are no longer needed

    def _keep(self, op: Op) -> None:
        """Encode what was rounded last; or write the block's file."""
        assert self._rounder is not None, "what is coded was chosen"
        if op.chunk > 0:
            self._rounder.encode()
            return
        for parameter in self._coded.values():
            self._rounder.finish(parameter)
        code, self._rounder = self._rounder.code, None  # the next block needs the room of rounded weights
        self._work.keep(self._block, code, self._left)

    def _forward(self, op: Op) -> None:
        weights, made = self._bound(rounded=op.slot(Pool.ROUNDED) >= 0), list[torch.Tensor]()
        weights.run(
            self._work.passes.lots[op.micro],
            self._run_of(op),
            lambda index: nullcontext(),
            lambda index, out: made.append(out),
        )
        self._work.slots[Pool.PASSED, op.slot(Pool.PASSED)] = made

    def _commit(self, op: Op) -> None:
        self._work.files[(self._block + 1) % 2].sync()
        self._work.commit(self._block)

    def _bound(self, *, rounded: bool) -> BlockWeights:
        assert self._weights is not None, "the block is open"
        if self._rounded is not rounded:
            self._weights.use(rounded=rounded)
            self._rounded = rounded
        return self._weights

    def _run_of(self, op: Op, cut: slice = slice(None)) -> Callable[[int], torch.Tensor]:
        """Return what runs the block on one of the lot's micro-batches, by its number among passes, or on a `cut` of it."""
        work, lot = self._work, self._work.passes.lots[op.micro]
        hidden = dict(zip(lot, work.slots[Pool.STASH, op.slot(Pool.STASH)], strict=True))
        device = work.machine.device

        def run(index: int) -> torch.Tensor:
            calls = work.chain.prologue(on_device(device, work.passes.rows[index].batch.cut(cut))).calls
            return work.chain.runner.block(self._block, hidden[index][cut].to(device), calls[self._block]).hidden

        return run


_HANDLERS: Mapping[Verb, Callable[[BlockRun, Op], None]] = {
    Verb.FETCH: BlockRun._fetch,
    Verb.IN: BlockRun._read_hidden,
    Verb.OUT: BlockRun._write_hidden,
    Verb.CATCH: BlockRun._catch,
    Verb.ROUND: BlockRun._round,
    Verb.KEEP: BlockRun._keep,
    Verb.FORWARD: BlockRun._forward,
    Verb.COMMIT: BlockRun._commit,
}
