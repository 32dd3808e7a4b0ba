"""Run an unmodified causal language model in three parts: what lies before its blocks, each block, what lies after.

It knows nothing of units or flat buffers: weights are whatever the modules hold. Invariant: only the part asked for is
computed, by the model's own code, and everything that carries a gradient out of it is returned.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import MoeModelOutputWithPast

from headrace.model.blocks.binding import come_by_rows
from headrace.model.blocks.chain_values import IGNORED, BlockResult, MicroBatch, PrologueResult
from headrace.model.blocks.sample_groups import SampleGroup, sample_groups_of
from headrace.model.blocks.taps import BlockCall, Taps
from headrace.model.parts.head_rows import ChunkOfHead, gradients_by_ranges, label_log_probs, logits_by_ranges
from headrace.model.parts.stored_rows import StoredRows
from headrace.terms.errors import ModelError

# A way to run a block: takes the block, its hidden states and its other arguments, and returns what the block returns.
RunBlock = Callable[[nn.Module, torch.Tensor, tuple[Any, ...], dict[str, Any]], Any]
# Input ids, final hidden states and targets of a chunk of positions.
LossChunk = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def run_block(block: nn.Module, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a block by the model's own code."""
    return block(hidden, *args, **kwargs)


@contextmanager
def left_as_found(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Undo what modules keep from one run for the next, such as rotary tables for long rows. Otherwise results would depend on
    what ran before, which differs after a resume; and fake tensors, of a run on shapes alone, would stay.
    """
    before = {module: (dict(vars(module)), dict(module._buffers)) for module in modules}
    try:
        yield
    finally:
        for module, (attributes, buffers) in before.items():
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


class Runner:
    """Runs the parts of `model`, whose repeated blocks are `blocks`, in any order.

    `tuple_length` says what a block returns (see `Taps`). With `collect_asides` the router logits of each block are caught.
    With `packs_by_masks` rows of several samples get masks that keep these apart, for models that make none from positions.
    Rows of `samples_from` tokens or more are run sample by sample if they hold several (None: never). Layers that carry a state
    along the row need that. Samples of about one length run together, with `by_exact_lengths` those of exactly one.
    `passed_over` are sets of parameter names: blocks with such parameters do not use what others hand them. `run_block` may be
    replaced by another way to run a block that computes the same, and `run_sample` by one for rows of any length. Losses take
    `head_rows` rows of the head at a time; 0: all.
    """

    def __init__(
        self,
        model: Any,
        blocks: Sequence[nn.Module],
        *,
        tuple_length: int | None,
        collect_asides: bool = False,
        packs_by_masks: bool = False,
        samples_from: int | None = None,
        by_exact_lengths: bool = False,
        passed_over: Collection[frozenset[str]] = (),
    ) -> None:
        self.model = model
        self.blocks = tuple(blocks)
        self.tuple_length = tuple_length
        self.packs_by_masks = packs_by_masks
        self.samples_from = samples_from
        self.by_exact_lengths = by_exact_lengths
        self.collects_asides = collect_asides
        self.run_block: RunBlock = run_block
        self.run_sample: RunBlock | None = None
        self.head_rows = 0
        self.takes = [parameter_names(block) not in passed_over for block in self.blocks]
        self._asides: list[torch.Tensor] | None = None
        self._coefficient: float | None = None
        inside = {id(module) for block in self.blocks for module in block.modules()}
        self.outside = [module for module in model.modules() if id(module) not in inside]
        if self.collects_asides:
            self._hook_routers()

    def prologue(self, batch: MicroBatch) -> PrologueResult:
        """Run everything before the blocks: embedding, masks, rotary tables."""
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        if batch.position_ids is not None:
            if batch.attention_mask is None and self.runs_by_samples(batch.position_ids.shape[1]):
                groups = sample_groups_of(batch.position_ids, exact=self.by_exact_lengths)
                if groups:
                    return self._prologue_by_samples(batch, groups)
            inputs["position_ids"] = batch.position_ids
            if self.packs_by_masks and batch.attention_mask is None:
                inputs["attention_mask"] = self._masks_of(batch.position_ids)
        return self._before_blocks(inputs)

    def runs_by_samples(self, length: int) -> bool:
        """Return whether rows of `length` tokens are run sample by sample, if there are several in one."""
        return self.samples_from is not None and length >= self.samples_from

    def _prologue_by_samples(self, batch: MicroBatch, groups: Sequence[SampleGroup]) -> PrologueResult:
        """Take hidden states from whole rows, so that the embedding has one gradient, and the calls from each group."""
        whole = self._before_blocks({"input_ids": batch.input_ids, "attention_mask": None})
        with torch.no_grad():
            alone = [
                self._before_blocks({"input_ids": group.rows_of(batch.input_ids), "attention_mask": None}).calls
                for group in groups
            ]
        calls = (BlockCall(samples=tuple(zip(groups, of_block, strict=True))) for of_block in zip(*alone, strict=True))
        return PrologueResult(whole.hidden, tuple(calls))

    def _before_blocks(self, inputs: dict[str, Any]) -> PrologueResult:
        with left_as_found(self.outside), Taps(self.blocks, self.tuple_length) as taps:
            self.model(**inputs, use_cache=False)
        if taps.hidden is None or len(taps.calls) != len(self.blocks):
            raise ModelError(
                f"{type(self.model).__name__}: its forward called {len(taps.calls)} of {len(self.blocks)} blocks; "
                "a model that skips or repeats blocks cannot be run block by block"
            )
        return PrologueResult(taps.hidden, taps.wanted_calls(self.takes))

    def _masks_of(self, position_ids: torch.Tensor) -> Any:
        """Return the masks that transformers makes from positions, for models that do not ask for them: by kind of layer, or
        one.
        """
        embedding = self.model.get_input_embeddings().weight
        like = torch.zeros((), dtype=embedding.dtype, device=position_ids.device)
        # Only shape, dtype and device of the embeddings are used.
        embeds = like.expand(*position_ids.shape, embedding.shape[-1])
        return create_masks_for_generate(self.model.config, embeds, None, None, position_ids=position_ids)

    def block(self, index: int, hidden: torch.Tensor, call: BlockCall) -> BlockResult:
        """Run block `index` (from 0) on hidden states (b, T, hidden)."""
        if not call.samples:
            return self._block(self.run_block, index, hidden, call)
        out: list[torch.Tensor] = []
        for group, own in call.samples:
            result = self._block(self.run_sample or self.run_block, index, group.rows_of(hidden), own)
            found = [result.hidden, *(aside.reshape(*group.places.shape, -1) for aside in result.asides)]
            out = out or [part.new_empty((hidden.shape[0] * hidden.shape[1], *part.shape[2:])) for part in found]
            for part, into in zip(found, out, strict=True):
                group.put(part, into)
        return BlockResult(out[0].reshape(*hidden.shape[:2], *out[0].shape[1:]), tuple(out[1:]))

    def block_gradient(
        self, index: int, hidden: torch.Tensor, call: BlockCall, gradients: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Run block `index` again, group by group, each with its backward; return the gradient of the hidden states.

        `gradients` are those of the block's hidden states and, if any, of what it handed aside. Parameters get theirs once for
        each group; no graph is larger than a group's.
        """
        found = torch.empty_like(hidden).flatten(0, 1)
        flat = [gradients[0].flatten(0, 1), *gradients[1:]]
        for group, own in call.samples:
            leaf = group.rows_of(hidden).detach().requires_grad_()
            result = self._block(self.run_sample or self.run_block, index, leaf, own)
            outputs = [result.hidden, *(aside.reshape(*group.places.shape, -1) for aside in result.asides)]
            torch.autograd.backward(outputs[: len(flat)], [group.gradients_of(gradient) for gradient in flat])
            group.put(leaf.grad, found)  # type: ignore[arg-type]
        return found.reshape(hidden.shape)

    def _block(self, run: RunBlock, index: int, hidden: torch.Tensor, call: BlockCall) -> BlockResult:
        asides: list[torch.Tensor] = []
        self._asides = asides
        try:
            with call.kept.at_hand() if call.kept is not None else nullcontext():
                out = run(self.blocks[index], hidden, *call.arguments())
        finally:
            self._asides = None
        for handed, value in zip(call.hands, out[1:] if isinstance(out, tuple) else (), strict=False):
            if handed is not None:
                handed.value = _without_gradient(value, self.blocks[index])
        return BlockResult(out[0] if isinstance(out, tuple) else out, tuple(asides))

    def loss_sum(self, input_ids: torch.Tensor, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum of token cross-entropies (float32 scalar) of a chunk of positions.

        `input_ids` and `targets` are (b, C), `hidden` the final hidden states (b, C, hidden). Norm, head, soft-capping and
        scaling are the model's own; logits exist for the chunk only, or with `head_rows` for some rows of the head.
        """
        if self.head_rows:
            return _loss_of(self.label_log_probs(input_ids, hidden, targets), targets)
        logits = self.logits(input_ids, hidden)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")

    def losses_by_ranges(self, chunks: Sequence[LossChunk], multiplier: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return for each chunk of positions (arguments as in `loss_sum`) its loss, and the gradient of its hidden states of
        `multiplier` times that: both as `loss_sum` gives them. Ranges of the head come one after the other, for all chunks.
        """
        losses: list[torch.Tensor] = []

        def gradient_of(number: int, log_probs: torch.Tensor) -> torch.Tensor:
            leaf = log_probs.detach().requires_grad_()
            with torch.enable_grad():
                loss = _loss_of(leaf, chunks[number][2])
                (loss * multiplier).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            assert leaf.grad is not None
            return leaf.grad

        head = self.model.get_output_embeddings()
        parts = [ChunkOfHead(partial(self._after_blocks, ids), hidden, targets) for ids, hidden, targets in chunks]
        gradients = gradients_by_ranges(head, self.head_rows, parts, gradient_of)
        return list(zip(losses, gradients, strict=True))

    def label_log_probs(self, input_ids: torch.Tensor, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the log-probability (b, C) of each target, float32; arguments as in `loss_sum`. What it is of positions
        without a target means nothing. Backward takes any gradient.
        """
        if self.head_rows:
            head = self.model.get_output_embeddings()
            return label_log_probs(head, self.head_rows, partial(self._after_blocks, input_ids), hidden, targets)
        logits = self.logits(input_ids, hidden).flatten(0, 1)
        return -F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="none").view(targets.shape)

    def logits(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (b, C, vocabulary) of a chunk of positions, float32; arguments as in `loss_sum`."""
        head = self.model.get_output_embeddings()
        if head is not None and come_by_rows(head.weight):
            return logits_by_ranges(head, self.head_rows, partial(self._after_blocks, input_ids), hidden)
        logits = self._after_blocks(input_ids, hidden)
        assert logits is not None, "no tap is reached"
        return logits.float()

    def _after_blocks(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return the logits as the model gives them; None if whoever stands in for the head wanted no more."""
        logits: torch.Tensor | None = None
        rows = self.model.get_input_embeddings()
        unread = rows.unwanted() if isinstance(rows, StoredRows) else nullcontext()
        with left_as_found(self.outside), unread, Taps(self.blocks, self.tuple_length, inject=hidden):
            logits = self.model(input_ids=input_ids, use_cache=False).logits
        return logits

    def aside_loss(self, asides: Sequence[torch.Tensor], attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Return the model's own auxiliary loss times its coefficient, over all tokens given.

        `asides` are router logits (N, experts), one tensor per router, in block order; `attention_mask` is (N,) or None, with 0
        for padding. The base model is replaced, so that the head class computes the loss from these logits.
        """
        if not self.collects_asides or not asides:
            raise ModelError(f"{type(self.model).__name__}: no router logits are collected (output_router_logits is off)")
        loss = self._head_on(asides, None if attention_mask is None else attention_mask.reshape(1, -1)).aux_loss
        if self._coefficient is None:
            self._coefficient = self._find_coefficient(asides)
        return torch.as_tensor(self._coefficient * loss)

    def _head_on(self, asides: Sequence[torch.Tensor], attention_mask: torch.Tensor | None) -> Any:
        """Return what the head class makes of router logits, and of hidden states of zero for two tokens."""
        model = self.model
        head = model.get_output_embeddings().weight
        base = getattr(model, model.base_model_prefix)
        stand_in = MoeModelOutputWithPast(
            last_hidden_state=torch.zeros(1, 2, head.shape[-1], dtype=head.dtype, device=head.device),
            router_logits=tuple(asides),
        )
        base.forward = lambda *args, **kwargs: stand_in
        try:
            ids = torch.zeros(1, 2, dtype=torch.int64, device=asides[0].device)
            return model(input_ids=ids, labels=ids, attention_mask=attention_mask, output_router_logits=True, use_cache=False)
        finally:
            del base.__dict__["forward"]

    @torch.enable_grad()
    def _find_coefficient(self, asides: Sequence[torch.Tensor]) -> float:
        """Return how much the model's loss grows per unit of auxiliary loss, whatever configuration keys decide it."""
        leaves = [
            torch.zeros(2, aside.shape[-1], device=aside.device, dtype=torch.float32).requires_grad_() for aside in asides
        ]
        out = self._head_on(leaves, None)
        if not isinstance(out.aux_loss, torch.Tensor) or not out.aux_loss.requires_grad:
            return 0.0
        (coefficient,) = torch.autograd.grad(out.loss, out.aux_loss, allow_unused=True)
        return 0.0 if coefficient is None else float(coefficient)

    def _hook_routers(self) -> None:
        specs = (getattr(self.model, "_can_record_outputs", None) or {}).get("router_logits", ())
        found = 0
        for spec in specs if isinstance(specs, list | tuple) else (specs,):
            target = getattr(spec, "target_class", spec)
            position = getattr(spec, "index", 1)
            path = getattr(spec, "layer_name", None)
            for block in self.blocks:
                for name, module in block.named_modules():
                    wanted = isinstance(target, type) and isinstance(module, target) and (not path or path.strip(".") in name)
                    if wanted:
                        module.register_forward_hook(self._catch(position))
                        found += 1
        if not found:
            raise ModelError(
                f"{type(self.model).__name__}: output_router_logits is on, but transformers names no router inside the blocks; "
                "router_aux_loss_coef 0 trains without the auxiliary loss"
            )

    def _catch(self, position: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._asides is not None:
                self._asides.append(output[position] if isinstance(output, tuple) else output)

        return hook


def parameter_names(block: nn.Module) -> frozenset[str]:
    """Return the names of a block's parameters within it; they distinguish kinds of blocks."""
    return frozenset(name for name, _ in block.named_parameters())


def _loss_of(log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of token cross-entropies."""
    return -torch.where(targets != IGNORED, log_probs, 0.0).sum()


def _without_gradient(value: Any, block: nn.Module) -> Any:
    """Return what a block hands to others, if backward needs nothing of it.

    Raises:
        ModelError: it has, or may have, a gradient, which would be lost.
    """
    if isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex():
        return value
    if value is None or isinstance(value, bool | int):
        return value
    what = f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise ModelError(
        f"{type(block).__name__}: cannot be run block by block. Its blocks pass on more than hidden states: {what}, which "
        "can have a gradient. Gradients go from block to block by hidden states alone"
    )
