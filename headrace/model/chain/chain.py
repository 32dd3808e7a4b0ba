"""A causal language model of transformers as a chain of units that can be run in any order, one bound at a time.

Unit 0 is the prologue (everything outside the blocks that is used before them, a tied head included), units 1..L are the
blocks. Unit L+1 is the epilogue; it exists only if something is used after the blocks alone.

Invariant: what a unit computes is what the unmodified model computes there, gradients included.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from headrace.model.blocks.beside import BesideKind
from headrace.model.blocks.binding import Binding, Bound, BringRows, GradientSink, RowSink, is_tied
from headrace.model.blocks.chain_values import BlockResult, MicroBatch, PrologueResult
from headrace.model.blocks.find_blocks import block_of, find_blocks, refuse_shared_between_blocks
from headrace.model.blocks.random_numbers import draws_random_numbers
from headrace.model.blocks.skeleton import build_skeleton
from headrace.model.blocks.taps import BlockCall
from headrace.model.blocks.text_part import note_on
from headrace.model.chain.compiled import CompiledBlocks, check_compiler, check_compiles
from headrace.model.chain.liger import LigerBlocks, check_liger
from headrace.model.directory.checkpoint import Checkpoint
from headrace.model.directory.matching import WeightMap, describe_unknown, load_buffers, match_weights, refuse_left_out_blocks
from headrace.model.kernels.narrow import NarrowProducts
from headrace.model.kernels.products import WideProducts
from headrace.model.parts.head_rows import rows_of_range
from headrace.model.parts.parted_experts import PartedExperts
from headrace.model.parts.runner import LossChunk, Runner, run_block
from headrace.model.trials.probe import Traits, probe
from headrace.terms.errors import ConfigError
from headrace.terms.layout import PARAMETER_ALIGNMENT, ParameterSpec, UnitLayout, lay_out, planes_with
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.packed_rows import padded_together


class Chain:
    """What the engine runs. Build it with `Chain.from_config`; no weight is materialised, units are bound to buffers.

    Attributes:
        config: the configuration as given.
        model: the skeleton: the transformers model whose unbound parameters are on the meta device.
        compute_dtype, dtype: name and torch dtype of the weights that compute uses; `device`: where the buffers are.
        layouts: one per unit; `num_blocks` blocks; `has_epilogue_unit`.
        tied: whether input embedding and head are one parameter.
        has_dropout: whether a block or the prologue draws random numbers in training mode: seed before each run of a unit.
        collects_asides: whether blocks hand router logits aside for an auxiliary loss.
        notes: what a person should know about how blocks are run, where that is not by the model's own code as it stands.
        wide_products: whether products of 16-bit numbers are computed in float32 in the context of `arithmetic`.
        narrow_products: whether up to four rows are multiplied by a loop of our own there (`NarrowProducts`).
        runner: what runs the parts of the model.
        adapters: what is computed beside matrices, None where nothing is; they are bound with their units.
        packing_reason: why blocks do not keep several samples in one row apart; `packs` and `runs_by_samples` say where.
    """

    def __init__(
        self, config: Any, skeleton: Any, traits: Traits, *, compute_dtype: str, optimizer: Optimizer, alignment: int
    ) -> None:
        self.config = config
        self.model = skeleton
        self.compute_dtype = compute_dtype
        self.dtype: torch.dtype = getattr(torch, compute_dtype)
        self.device = torch.device("cpu")
        blocks = find_blocks(skeleton)
        self.layouts = _lay_out_units(skeleton, blocks.name, traits, optimizer, alignment)
        self.num_blocks = len(blocks.modules)
        self.has_epilogue_unit = len(self.layouts) == self.num_blocks + 2
        self.tied = is_tied(skeleton)
        self.has_dropout = draws_random_numbers(skeleton)
        self.notes: tuple[str, ...] = _packing_notes(traits)
        self.wide_products = self.narrow_products = False
        self.adapters: BesideKind | None = None
        self.parts: PartedExperts | None = None  # stands where modules of experts stood
        self._packing_limit = traits.packing_limit
        self.packing_reason = traits.packing_reason
        self.runner = Runner(
            skeleton,
            blocks.modules,
            tuple_length=traits.tuple_length,
            collect_asides=traits.has_aside_loss,
            packs_by_masks=traits.packs_by_masks,
            samples_from=traits.samples_from,
            by_exact_lengths=traits.by_exact_lengths,
            passed_over=traits.passed_over,
        )
        self.collects_asides = self.runner.collects_asides
        self._head_by_rows = traits.head_by_rows
        if traits.head_by_rows:
            self.take_head_by(rows_of_range(*skeleton.get_output_embeddings().weight.shape))
        self._attached: WeightMap | None = None
        self._binding = Binding(skeleton, self.layouts, self.dtype)
        self._resident = (0, self.num_blocks + 1) if self.has_epilogue_unit else (0,)

    @classmethod
    def from_config(
        cls, config: Any, compute_dtype: str, optimizer: Optimizer, parameter_alignment: int = PARAMETER_ALIGNMENT
    ) -> "Chain":
        """Return the chain of the model that `config`, a configuration of transformers, describes.

        `optimizer` says which parameters are decayed; `parameter_alignment` is that of its rule's planes.

        Raises:
            ConfigError: the compute dtype is not known.
            ModelError: the architecture cannot be run block by block; the message says why.
        """
        planes_with(compute_dtype, ())  # refuses before the model is built
        skeleton = build_skeleton(config, getattr(torch, compute_dtype))
        traits = probe(config)
        return cls(config, skeleton, traits, compute_dtype=compute_dtype, optimizer=optimizer, alignment=parameter_alignment)

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states between blocks."""
        return int(self.config.get_text_config().hidden_size)

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model has an embedding for."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def stored_type(self) -> str:
        """The type, as transformers calls it, of the model in the files, of which this one may be a part."""
        model = self.model if self._attached is None else self._attached.stored_model
        return str(model.config.model_type)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, tied ones counted once, without padding."""
        return sum(layout.num_parameters for layout in self.layouts)

    def packs(self, length: int) -> bool:
        """Return whether several samples may share a row of `length` tokens without seeing one another."""
        return self._packing_limit is None or length < self._packing_limit or self.runs_by_samples(length)

    def runs_by_samples(self, length: int) -> bool:
        """Return whether blocks run on each sample by itself where rows of `length` tokens hold several samples.

        Gradients are then those of `block_gradient`, and nothing of such rows is replayed: which operators run depends on the
        lengths of the samples.
        """
        return self.runner.runs_by_samples(length)

    def padded_together(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the places of rows in groups, in order: padded to its group's longest, a row computes what it does alone."""
        exact = self.runner.by_exact_lengths or (self._packing_limit and self.runner.samples_from is None)  # else: untried
        return padded_together(lengths, (self._packing_limit or 0) if exact else None)

    def groups_exactly(self, length: int) -> bool:
        """Return whether rows of `length` tokens are run in groups of samples of exactly one length."""
        return self.runner.by_exact_lengths and self.runs_by_samples(length)

    @property
    def packs_by_masks(self) -> bool:
        """Whether packed rows get masks of their own, because the model makes none from positions."""
        return self.runner.packs_by_masks

    def lay_out(self, layouts: Sequence[UnitLayout], others: Mapping[int, Bound] | None = None) -> None:
        """Give parameters of units other places from here on (`others`: see `Binding`). Afterwards no unit is bound."""
        self.layouts = tuple(layouts)
        self._binding = Binding(self.model, self.layouts, self.dtype, others or {})

    def bind(
        self,
        unit: int,
        flat: torch.Tensor,
        gradient_sink: GradientSink | None,
        wanted: Callable[[ParameterSpec], bool] = lambda spec: True,
        *,
        rows: RowSink | None = None,
        as_loaded: bool = False,
        rest: UnitLayout | None = None,
    ) -> None:
        """Make the parameters of `unit` views of `flat` (1-D, compute dtype). See `Binding.bind`."""
        self._binding.bind(unit, flat, gradient_sink, wanted, rows=rows, as_loaded=as_loaded, rest=rest)

    def release(self, unit: int) -> None:
        """Put the parameters of `unit` back on the meta device: running it is an error until it is bound."""
        self._binding.release(unit)

    def attach(self, checkpoint: Checkpoint, *, leave_out_blocks: bool = False) -> WeightMap:
        """Match the tensors of `checkpoint` with the parameters, once, and load the persistent buffers that it holds.

        Call it before the first step, also when weights come from elsewhere: some buffers (router corrections) are in no unit.
        Nothing but headers and those buffers is read. `leave_out_blocks` allows weights of blocks that the configuration does
        not have.

        Raises:
            ModelError: the checkpoint does not fit the model; the message names what is missing or of another shape.
        """
        if self._attached is None or self._attached.checkpoint is not checkpoint:
            weights = match_weights(checkpoint, self.model)
            if not leave_out_blocks:
                refuse_left_out_blocks(weights)
            load_buffers(weights)
            self._attached = weights
            self.notes += checkpoint.notes
            if checkpoint.whole is not None:
                self.notes += (note_on(checkpoint.whole),)
            if weights.unknown:
                self.notes += (f"{describe_unknown(weights.unknown)}: not trained, and exported as they came",)
        return self._attached

    @property
    def unused_tensors(self) -> tuple[str, ...]:
        """Names of the stored tensors that the model does not use; none before `attach`."""
        return () if self._attached is None else tuple(self._attached.unused)

    def move_buffers(self, device: torch.device | str) -> None:
        """Move all buffers (rotary tables, scales, router corrections) to `device`, where the chain runs from here on."""
        self.device = torch.device(device)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)

    @contextlib.contextmanager
    def adapted(self, adapters: BesideKind | None) -> Iterator[None]:
        """Have blocks compute with `adapters` in this context; None stands for none."""
        before = self.adapters, self.has_dropout, self.notes, self.head_rows
        undo = adapters.install(self.model) if adapters is not None else lambda: None
        self.adapters = adapters
        self.notes += adapters.notes if adapters is not None else ()
        self.has_dropout |= adapters is not None and adapters.dropout > 0
        if adapters is not None and any(unit in adapters.layouts for unit in self._resident):
            self.take_head_by(0)  # what is added to a head's logits is for all of its rows
        try:
            yield
        finally:
            undo()
            self.adapters, self.has_dropout, self.notes, self.runner.head_rows = before

    @property
    def replayable(self) -> bool:
        """Whether blocks run by the model's own code, whose operators can be recorded, named and replayed one by one."""
        return self.runner.run_block is run_block

    @contextlib.contextmanager
    def own_code(self) -> Iterator[None]:
        """Run blocks by the model's own code in this context: what counts operators, or runs on shapes alone, needs it."""
        installed, self.runner.run_block = self.runner.run_block, run_block
        try:
            yield
        finally:
            self.runner.run_block = installed

    def compile_blocks(self) -> None:
        """Run blocks under `torch.compile` from here on. Call it after `move_buffers`; see `CompiledBlocks`.

        Raises:
            ConfigError: blocks draw random numbers, are not one graph each, or there is no compiler; nothing has changed.
        """
        if self.has_dropout:
            raise ConfigError(
                f"compile_blocks: {type(self.model).__name__} has dropout, and compiled code would draw other numbers in "
                "recompute than in forward. Set its dropout rates to 0 in config.json, or leave compile_blocks out"
            )
        check_compiler(self.device)
        check_compiles(self.config)
        # Samples do not run compiled: each of their lengths would be another graph.
        self.runner.run_block, self.runner.run_sample = CompiledBlocks(), run_block
        self.notes += (
            "blocks are compiled: no operator output is kept or skipped; the first step takes longer, and more memory",
        )

    def use_liger(self) -> None:
        """Run the norms, gated products and rotations of blocks by Liger's kernels from here on. Call it after `move_buffers`.

        Raises:
            ConfigError: no GPU, no package, nothing in it for this architecture, or a gradient differs; nothing has changed.
        """
        check_liger(self.config, self.device)
        blocks = LigerBlocks(self.model, self.runner.blocks)
        self.runner.run_block = blocks
        self.notes += (f"blocks use Liger's kernels in {blocks.describe()}: no operator output is kept or skipped",)

    def multiply_wide(self) -> None:
        """Compute products of 16-bit numbers in float32 from here on: for processors without instructions for them."""
        if self.compute_dtype != "float32":
            self.wide_products = True
            self.notes += (
                f"products of {self.compute_dtype} are computed in float32: this processor has no instructions for them",
            )

    def run_experts_one_by_one(self) -> None:
        """Have the model multiply with each expert by itself from here on, where it also knows other ways."""
        if hasattr(self.model, "set_experts_implementation"):
            self.model.set_experts_implementation("eager")

    def arithmetic(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which everything of the chain has to run, backward included."""
        if self.narrow_products:
            return NarrowProducts(wide=self.wide_products)
        return WideProducts() if self.wide_products else contextlib.nullcontext()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Run everything as in evaluation in this context: without dropout."""
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()

    def prologue(self, batch: MicroBatch) -> PrologueResult:
        """Run everything before the blocks, with a graph if gradients are enabled. Needs unit 0."""
        self._binding.require(0)
        return self.runner.prologue(batch)

    def block(self, index: int, hidden: torch.Tensor, call: BlockCall) -> BlockResult:
        """Run block `index` (0..num_blocks-1, unit index+1) on hidden states (b, T, hidden). Needs that unit."""
        self._binding.require(index + 1)
        return self.runner.block(index, hidden, call)

    def block_gradient(
        self, index: int, hidden: torch.Tensor, call: BlockCall, gradients: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the gradient of a block's input, for a call with `samples`. See `Runner.block_gradient`. Needs that unit."""
        self._binding.require(index + 1)
        return self.runner.block_gradient(index, hidden, call, gradients)

    def loss_sum(self, input_ids: torch.Tensor, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum of token cross-entropies of a chunk of positions, float32. Needs prologue and epilogue units.

        Shapes: ids and targets (b, C), hidden (b, C, hidden). Ids only feed code whose result is dropped.
        """
        self._binding.require(*self._resident)
        return self.runner.loss_sum(input_ids, hidden, targets)

    def losses_by_ranges(self, chunks: Sequence[LossChunk], multiplier: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return for each chunk of positions its loss, and the gradient of its hidden states. See `Runner.losses_by_ranges`."""
        self._binding.require(*self._resident)
        return self.runner.losses_by_ranges(chunks, multiplier)

    def bring_by_rows(self, name: str, bring: BringRows) -> None:
        """Have some rows of a frozen parameter come at a time. See `Binding.bring_by_rows`."""
        self._binding.bring_by_rows(name, bring)

    def logits(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (b, C, vocabulary) of a chunk of positions, float32. Needs prologue and epilogue units.

        `hidden` (b, C, hidden) are the final hidden states; ids only feed code whose result is dropped.
        """
        self._binding.require(*self._resident)
        return self.runner.logits(input_ids, hidden)

    def label_log_probs(self, input_ids: torch.Tensor, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the log-probability (b, C) of each target, float32. See `Runner.label_log_probs`, and `loss_sum`."""
        self._binding.require(*self._resident)
        return self.runner.label_log_probs(input_ids, hidden, targets)

    @property
    def head_rows(self) -> int:
        """How many rows of the head losses take at a time; 0: all."""
        return self.runner.head_rows

    def take_head_by(self, rows: int) -> None:
        """Take so many `rows` of the head at a time in losses, 0: all. Where a logit needs other rows, too, all are taken."""
        self.runner.head_rows = rows if self._head_by_rows else 0

    def aside_loss(self, asides: Sequence[torch.Tensor], attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Return coefficient times the model's auxiliary loss over a whole step.

        `asides`: router logits (N, experts), one tensor per router in block order. N are all tokens of all micro-batches in
        order. `attention_mask` is (N,) with 0 for padding, or None. Its gradient is *not* to be divided by the number of
        trained tokens.
        """
        self._binding.require(*self._resident)
        return self.runner.aside_loss(asides, attention_mask)


def _lay_out_units(
    model: nn.Module, blocks_name: str, traits: Traits, optimizer: Optimizer, parameter_alignment: int
) -> tuple[UnitLayout, ...]:
    """Sort the parameters of `model` into units and place them."""
    refuse_shared_between_blocks(model, blocks_name)
    num_blocks = len(model.get_submodule(blocks_name))  # type: ignore[arg-type]
    units: list[list[tuple[str, tuple[int, ...], tuple[float, float]]]] = [[] for _ in range(num_blocks + 2)]
    kinds = traits.kinds.of(model, blocks_name)
    for name, parameter in model.named_parameters():
        entry = (name, tuple(parameter.shape), optimizer.group_of(name, parameter.dim(), kinds.get(name, "")))
        block = block_of(name, blocks_name)
        if block is None:
            block = num_blocks if name in traits.epilogue_names else -1
        units[block + 1].append(entry)
    names = ["prologue", *(f"block.{index}" for index in range(num_blocks)), "epilogue"]
    laid_out = [lay_out(name, unit, parameter_alignment, kinds) for name, unit in zip(names, units, strict=True)]
    return tuple(laid_out if units[-1] else laid_out[:-1])


def _packing_notes(traits: Traits) -> tuple[str, ...]:
    if traits.samples_from is None:
        return ()
    which = f" of {traits.samples_from} tokens and more" if traits.samples_from else ""
    return (
        f"packed rows{which} are run sample by sample (those of one length together), without replay: {traits.packing_reason}",
    )
