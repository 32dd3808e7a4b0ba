"""Compresses a model block by block in a forward pass: each block's weights are rounded before its outputs are computed.

One block of the model is in memory, and what lies around the blocks; the hidden states of all rows wait in files between
blocks. The matrices that a block multiplies are rounded for the inputs that it gets from blocks already rounded (GPTQ; QMoE's
driver, section 3.2). Held-out rows pass twice, through the weights as they came and as coded: the rise of their loss is the
cost. Invariant: after `advance` of a block has returned, the next block needs nothing else. So a run that was killed continues
from there, with the same bits.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from headrace.codec.targets import Target, with_one_group
from headrace.compress.block_weights import BlockByExperts, BlockWeights, WholeBlock
from headrace.compress.hidden_rows import HiddenRows
from headrace.compress.room import room_in
from headrace.compress.rounding import BlockCode, BlockRounder, Coded, catch_groups, choose
from headrace.engine.open_model import Purpose, open_model
from headrace.machine.here import this_machine
from headrace.model import IGNORED, MicroBatch, import_unit, shift_labels
from headrace.model.bank_check import why_no_banks
from headrace.model.banks import find_experts
from headrace.model.caught import CatchInputs, Matrix
from headrace.model.stock_loading import reads_weights_at_load
from headrace.terms.errors import ModelError
from headrace.terms.layout import UnitLayout, planes_with
from headrace.terms.sizes import MIB

# Experts with many tokens are given at most so many times the mean (QMoE, section 3.2).
_MOST_OF_MEAN = 4
_LOGIT_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of the data; `counts` (b, T) bool says which tokens count as inputs of a matrix. If `held_out`, none do."""

    batch: MicroBatch
    counts: torch.Tensor
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class _Pass:
    """Rows on their way through the blocks, with weights as they came (`plain`) or as they are coded."""

    rows: Rows
    plain: bool


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
        rows: Sequence[Rows],
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
        self._target, self._experts_only = target, experts_only
        self._plane = planes_with(compute_dtype, ()).weight
        self._passes = [_Pass(each, False) for each in rows] + [_Pass(each, True) for each in rows if each.held_out]
        self._files: list[HiddenRows] = []
        self._resident: list[torch.Tensor] = []
        self._folder = folder
        self._experts = find_experts(self.chain.model, self.chain.runner.blocks)
        each, single = self._plane.bytes_per_element, self._come_singly()
        self.room = room_in(self.chain, self._experts, host_bytes, each, come_singly=single, by_experts=by_experts)

    def _come_singly(self) -> bool:
        """Return whether experts can come one at a time: the architecture asks for them so, and each is stored by itself."""
        names = [name for experts in self._experts if experts is not None for name in experts.names.values()]
        pieces = [self.weights.pieces.get(name, ()) for name in names]
        single = all(found and all(piece.index and isinstance(piece.index[0], int) for piece in found) for found in pieces)
        return bool(names) and single and not why_no_banks(self.checkpoint.config)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the model."""
        return self.chain.num_blocks

    def prepare(self, *, blocks_done: int) -> None:
        """Load what lies around the blocks; at the beginning, also fill the first file of hidden states."""
        with torch.no_grad(), self._running():
            for unit in (0, self.num_blocks + 1) if self.chain.has_epilogue_unit else (0,):
                self._resident.append(self._load(self.chain.layouts[unit]))
                self.chain.bind(unit, self._resident[-1], None)
            shapes = [self._first(each.rows.batch).shape for each in self._passes]
            self._files = [HiddenRows(self._folder / f"hidden-{index}", shapes) for index in range(2)]
            if not blocks_done:
                for index, each in enumerate(self._passes):
                    self._files[0].write(index, self._first(each.rows.batch))
                self._files[0].sync()

    def _first(self, batch: MicroBatch) -> torch.Tensor:
        start = self.chain.prologue(self._on_device(batch))
        if any(call.hands or call.gets for call in start.calls):
            raise ModelError(
                f"{type(self.chain.model).__name__}: its blocks pass on more than hidden states, and compression keeps "
                "nothing else between blocks. Models of this kind cannot be compressed yet"
            )
        return start.hidden

    @torch.no_grad()
    def advance(self, block: int) -> tuple[BlockCode, dict[str, str]]:
        """Round block `block` and run all rows through it; return its code, and by name why other matrices are left as they
        are.

        Raises:
            ModelError: an input of a matrix is not finite.
        """
        read, write = self._files[block % 2], self._files[(block + 1) % 2]
        weights = self._open(block)

        def go(*, plain: bool) -> None:
            items = [index for index, each in enumerate(self._passes) if each.plain == plain]
            weights.run(items, lambda index: self._run(block, index, read), lambda index: contextlib.nullcontext(), write.write)

        try:
            with self._running():
                weights.use(rounded=False)
                go(plain=True)
                coded, left = self._round(block, read, weights)
                weights.use(rounded=True)
                go(plain=False)
            write.sync()
        finally:
            weights.close()
        return coded, left

    def _open(self, block: int) -> BlockWeights:
        """Return the weights of a block; by experts, if both of its forms would take more than half of memory."""
        unit, experts = block + 1, self._experts[block]
        if experts is None or not self.room.by_experts:
            return WholeBlock(self.chain, unit, self._load)
        return BlockByExperts(self.chain, self.weights, unit, experts, self._load, self._folder / "rounded")

    @torch.no_grad()
    def losses(self) -> tuple[float, float, int]:
        """Return the mean loss of held-out rows with weights as they came, the one with coded weights, and the number of
        tokens.
        """
        file, sums = self._files[self.num_blocks % 2], {False: 0.0, True: 0.0}
        tokens = 0
        with self._running():
            for index, each in enumerate(self._passes):
                if each.rows.held_out:
                    sums[each.plain] += self._loss_sum(each.rows.batch, file.read(index).to(self.machine.device))
                    tokens += int((shift_labels(each.rows.batch.labels) != IGNORED).sum()) if each.plain else 0
        return sums[True] / max(1, tokens), sums[False] / max(1, tokens), tokens

    def close(self) -> None:
        """Close the files of hidden states."""
        for file in self._files:
            file.close()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        with self.chain.evaluating(), self.chain.arithmetic():
            yield

    def _load(self, layout: UnitLayout) -> torch.Tensor:
        """Return the weights of a layout as compute reads them, flat."""
        plane = np.empty(layout.num_elements, self._plane.dtype)
        import_unit(self.weights, layout, plane, None)
        flat = torch.from_numpy(plane.view(np.uint8)).view(self.chain.dtype)
        return flat.to(self.machine.device)

    def _run(self, block: int, index: int, read: HiddenRows) -> torch.Tensor:
        calls = self.chain.prologue(self._on_device(self._passes[index].rows.batch)).calls
        return self.chain.runner.block(block, read.read(index).to(self.machine.device), calls[block]).hidden

    def _on_device(self, batch: MicroBatch) -> MicroBatch:
        device = self.machine.device
        if device.type == "cpu":
            return batch
        values = [batch.input_ids, batch.labels, batch.attention_mask, batch.position_ids, batch.token_mask]
        return MicroBatch(*(None if value is None else value.to(device) for value in values))  # type: ignore[arg-type]

    def _round(self, block: int, read: HiddenRows, weights: BlockWeights) -> tuple[BlockCode, dict[str, str]]:
        """Round the matrices of a block whose weights are bound as they came."""
        specs = self.chain.layouts[block + 1].parameters
        calibrating = [index for index, each in enumerate(self._passes) if not each.rows.held_out]
        seen = self._caught(block, calibrating[:1], read, weights, CatchInputs(weights.places, ())).seen
        coded, left = choose(self.weights, specs, seen, self._target, experts_only=self._experts_only)
        rounder = BlockRounder(self.weights, weights.rounded, self._target, self.room.sums_bytes)
        by_name = {parameter.spec.name: parameter for parameter in coded}
        most = self._most_tokens(coded, seen, calibrating)
        for group in catch_groups(coded, self.room.sums_bytes):
            mode = CatchInputs(weights.places, group, lambda matrix: most.get(matrix.name))
            self._caught(block, calibrating, read, weights, mode)
            for name in dict.fromkeys(matrix.name for matrix in group):
                rounder.round(by_name[name], [matrix for matrix in group if matrix.name == name], mode.caught)
        for parameter in coded:
            rounder.finish(parameter)
        return rounder.code, left

    def _caught(
        self, block: int, indices: Sequence[int], read: HiddenRows, weights: BlockWeights, mode: CatchInputs
    ) -> CatchInputs:
        wanted = frozenset(matrix.expert for matrix in mode.wanted if matrix.expert is not None)
        weights.run(
            indices,
            lambda index: self._run(block, index, read),
            lambda index: mode.of_rows(self._passes[index].rows.counts),
            lambda index, out: None,
            wanted if mode.wanted else None,
        )
        return mode

    def _most_tokens(self, coded: Sequence[Coded], seen: Mapping[Matrix, int], calibrating: Sequence[int]) -> dict[str, int]:
        """Return by parameter for how many tokens an expert's inputs are added up."""
        tokens = sum(int(self._passes[index].rows.counts.sum()) for index in calibrating)
        first = self._passes[calibrating[0]].rows.counts.numel()
        most = {}
        for parameter in coded:
            if parameter.experts > 1:
                experts_of_a_token = sum(seen.get(matrix, 0) for matrix in parameter.matrices()) / first
                most[parameter.spec.name] = math.ceil(_MOST_OF_MEAN * tokens * experts_of_a_token / parameter.experts)
        return most

    def _loss_sum(self, batch: MicroBatch, hidden: torch.Tensor) -> float:
        batch = self._on_device(batch)
        targets, total = shift_labels(batch.labels), 0.0
        positions = max(1, _LOGIT_BYTES // (4 * self.chain.vocabulary * hidden.shape[0]))
        for start in range(0, hidden.shape[1], positions):
            span = slice(start, start + positions)
            if bool((targets[:, span] != IGNORED).any()):
                total += float(self.chain.loss_sum(batch.input_ids[:, span], hidden[:, span], targets[:, span]))
        return total
