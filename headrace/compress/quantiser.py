"""Compresses a model block by block in a forward pass: each block's weights are rounded before its outputs are computed.

What lies around the blocks is in memory, a block in two forms, and where there is room the next block. The hidden states of all
rows wait in files between blocks. The matrices that a block multiplies are rounded for the inputs that it gets from blocks
already rounded (GPTQ; QMoE's driver, section 3.2). Held-out rows pass twice, through the weights as they came and as coded: the
rise of their loss is the cost. `schedule.py` says in which order, `verbs.py` what is done. Invariant: a block that is committed
has left all that the next one needs. So a run that was killed continues from there, with the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from headrace.codec.table import CODES
from headrace.codec.targets import Target, with_one_group
from headrace.compress.block_weights import TOGETHER
from headrace.compress.hidden_rows import HiddenRows
from headrace.compress.room import room_in
from headrace.compress.schedule import ProgramFigures, build_block
from headrace.compress.verbs import BlockRun, CompressionWork, DataRows, Keep, RowPasses
from headrace.engine.open_model import Purpose, open_model
from headrace.flow.run.execute import Interpreter, interpreter_of
from headrace.machine.here import this_machine
from headrace.model import IGNORED, MicroBatch, shift_labels
from headrace.model.parts.banks import BlockExperts, find_experts
from headrace.model.seats.bank_check import why_no_banks
from headrace.model.seats.scoring import loss_sum, on_device
from headrace.model.trials.stock_loading import reads_weights_at_load
from headrace.plan.schedules.ledger import Snapshot
from headrace.terms.errors import ModelError, StepFailed
from headrace.terms.lanes import Lane
from headrace.terms.layout import planes_with
from headrace.terms.program import Op, Program


class Quantiser:
    """Opens the model in `directory` and rounds it for `target`. Hidden states lie in `folder`, which exists. Close it.

    `by_experts`: whether experts of mixtures are in memory one at a time; None: where a block would take too much memory.

    Attributes:
        checkpoint, chain, weights: the model as it is stored, as units, and where each of their parameters is stored.
        room: what memory is for.
        decodes_at_load: whether stock transformers has to decode matrices while it reads the files.

    Raises:
        ModelError: the model cannot be run block by block.
    """

    def __init__(
        self,
        directory: Path,
        target: Target,
        rows: Sequence[DataRows],
        folder: Path,
        *,
        compute_dtype: str,
        host_bytes: int,
        experts_only: bool = False,
        by_experts: bool | None = None,
    ) -> None:
        self.machine = this_machine(None)
        opened = open_model(directory, self.machine, Purpose(compute_dtype=compute_dtype, reads_codes=False))
        self.checkpoint, self.chain, self.weights = opened.checkpoint, opened.chain, opened.weights
        self.chain.run_experts_one_by_one()
        self.decodes_at_load = reads_weights_at_load(self.checkpoint.config)
        if self.decodes_at_load:  # transformers then decodes all matrices but those of experts with one size of groups
            matrices = [spec for layout in self.chain.layouts[1:] for spec in layout.parameters if len(spec.shape) == 2]
            target = with_one_group(target, [spec.shape[-1] for spec in matrices])
        plane, experts = planes_with(compute_dtype, ()).weight, find_experts(self.chain.model, self.chain.runner.blocks)
        single = self._come_singly(experts)
        size = plane.bytes_per_element
        code = CODES.get(target.name)  # a program's own need not be there
        self.room = room_in(self.chain, experts, host_bytes, size, come_singly=single, by_experts=by_experts, code=code)
        passes = RowPasses.of(rows, TOGETHER if self.room.by_experts else 1)
        self._work = CompressionWork(self, target, experts, plane, folder, passes, experts_only=experts_only)
        self._resident: list[torch.Tensor] = []

    def _come_singly(self, experts: Sequence[BlockExperts | None]) -> bool:
        """Return whether experts can come one at a time: the architecture asks for them so, and each is stored by itself."""
        names = [name for each in experts if each is not None for name in each.names.values()]
        pieces = [self.weights.pieces.get(name, ()) for name in names]
        single = all(found and all(piece.index and isinstance(piece.index[0], int) for piece in found) for found in pieces)
        return bool(names) and single and not why_no_banks(self.checkpoint.config)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the model."""
        return self.chain.num_blocks

    def prepare(self, *, blocks_done: int) -> None:
        """Load what lies around the blocks; at the beginning, also fill the first file of hidden states."""
        work = self._work
        with torch.no_grad(), self._running():
            for unit in (0, self.num_blocks + 1) if self.chain.has_epilogue_unit else (0,):
                self._resident.append(work.load(self.chain.layouts[unit]))
                self.chain.bind(unit, self._resident[-1], None)
            shapes = [self._first(each.batch).shape for each in work.passes.rows]
            work.files += [HiddenRows(work.folder / f"hidden-{index}", shapes) for index in range(2)]
            if not blocks_done:
                for index, each in enumerate(work.passes.rows):
                    work.files[0].write(index, self._first(each.batch))
                work.files[0].sync()

    def _first(self, batch: MicroBatch) -> torch.Tensor:
        start = self.chain.prologue(on_device(self.machine.device, batch))
        if any(call.hands or call.gets for call in start.calls):
            raise ModelError(
                f"{type(self.chain.model).__name__}: its blocks pass on more than hidden states, and compression keeps "
                "nothing else between blocks. Models of this kind cannot be compressed yet"
            )
        return start.hidden

    def program_figures(self) -> ProgramFigures:
        """Return what the programs of all blocks follow from."""
        return self._work.program_figures()

    def run(self, keep: Keep, commit: Callable[[int], None] = lambda block: None, *, blocks_done: int = 0) -> None:
        """Round the blocks that are left, and run all rows through them. `keep` writes a block's file, `commit` notes that the
        block is done. Threads of lanes call them, one block after the other, while the next block computes.

        Raises:
            ModelError: an input of a matrix is not finite.
        """
        self._work.keep, self._work.commit = keep, commit
        plan, before = self.program_figures(), Snapshot()
        interpreter = interpreter_of("overlapped", self.machine, None)
        try:
            with self._running():
                for block in range(blocks_done, self.num_blocks):
                    program, before = build_block(plan, block, before)
                    self._run_block(block, program, interpreter)
            interpreter.wait()
        except StepFailed as failure:
            raise failure.__cause__ or failure from None
        finally:
            interpreter.close()

    def _run_block(self, block: int, program: Program, interpreter: Interpreter) -> None:
        """Compute a block; what other lanes do for it may go on."""
        run = BlockRun(self._work, block)

        def perform(op: Op) -> None:
            with torch.no_grad(), self.chain.arithmetic() if op.lane is Lane.COMPUTE else nullcontext():
                run.perform(op)

        try:
            interpreter.run(program, perform, block)
        finally:
            run.close()

    @torch.no_grad()
    def losses(self) -> tuple[float, float, int]:
        """Return the mean loss of held-out rows with weights as they came, the one with coded weights, and the number of
        tokens.
        """
        passes, file = self._work.passes, self._work.files[self.num_blocks % 2]
        device, sums, tokens = self.machine.device, [], 0
        with self._running():
            for indices in (passes.plain, passes.held_out):
                batches = [on_device(device, passes.rows[index].batch) for index in indices]
                found = zip(batches, indices, strict=True)
                sums.append(sum(loss_sum(self.chain, batch, file.read(index).to(device)) for batch, index in found))
                tokens = sum(int((shift_labels(batch.labels) != IGNORED).sum()) for batch in batches)
        return sums[0] / max(1, tokens), sums[1] / max(1, tokens), tokens

    def close(self) -> None:
        """Close the files of hidden states."""
        for file in self._work.files:
            file.close()

    @contextmanager
    def _running(self) -> Iterator[None]:
        with self.chain.evaluating(), self.chain.arithmetic():
            yield
