"""Find out by trying what the chain must know about an architecture, on a tiny instance of it.

Invariant: nothing about an architecture is written down here; a family that transformers adds tomorrow is treated the same way,
or refused with the reason.
"""

import inspect
import json
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import nn

from headrace.model.blocks.chain_values import IGNORED, MicroBatch, shift_labels
from headrace.model.blocks.find_blocks import check_architecture, find_blocks, refuse_shared_between_blocks
from headrace.model.blocks.kinds import NO_KINDS, Kinds, find_kinds
from headrace.model.blocks.skeleton import build_skeleton
from headrace.model.parts.runner import Runner, parameter_names
from headrace.model.trials.block_major import (
    RELATIVE_TOLERANCE,
    block_major_backward,
    differing_gradient,
    plain_loss,
    take_gradients,
)
from headrace.model.trials.head_check import takes_head_by_rows
from headrace.model.trials.instance import LENGTHS, tiny_runner, tiny_samples
from headrace.model.trials.thresholds import architecture_key, key_without, tiny_of
from headrace.terms.errors import HeadraceError, ModelError, in_one_line

# What rounding alone changes of results in groups: at most 1e-6 was measured on 40 architectures in float32.
_ROUNDING = 1e-5
# Pairs of samples on which it is tried which parameters have a gradient.
_INPUTS = 4


@dataclass(frozen=True, slots=True)
class Traits:
    """What trying told: what a block returns, which parameters come after the blocks only, whether samples can be packed.

    `blocks_name` is the dotted name of the list of blocks. Samples can be packed into rows of fewer than `packing_limit` tokens
    (None: of any number, 0: not at all). `packing_reason` says why not into longer ones. With `packs_by_masks` samples are kept
    apart by masks that the model does not make from positions itself. With `runs_by_samples` longer rows hold several samples,
    too, but blocks run on each by itself. `by_exact_lengths` says that none may be padded to another's length.
    `has_aside_loss`: as configured, the model adds an auxiliary loss of router logits. `passed_over` are names of the
    parameters of blocks that do not use what other blocks hand them besides hidden states. `kinds` are those of parameters that
    shapes do not tell. `head_by_rows`: each logit follows from its own row of the head, so losses may take some rows at a time.
    """

    blocks_name: str
    tuple_length: int | None
    epilogue_names: frozenset[str]
    packing_limit: int | None
    packing_reason: str
    packs_by_masks: bool = False
    runs_by_samples: bool = False
    by_exact_lengths: bool = False
    has_aside_loss: bool = False
    passed_over: frozenset[frozenset[str]] = frozenset()
    kinds: Kinds = NO_KINDS
    head_by_rows: bool = False

    @property
    def samples_from(self) -> int | None:
        """From how many tokens on rows of several samples are run sample by sample; None: never."""
        return self.packing_limit if self.runs_by_samples else None


def probe(config: Any) -> Traits:
    """Return the traits of the architecture of `config`. Cached by architecture and structure.

    Raises:
        ModelError: the architecture is refused, cannot be shrunk, or cannot be run block by block.
    """
    check_architecture(config)
    with _words_for_its_errors(config):
        traits = _probe(cast(Hashable, type(config)), architecture_key(config))
        if traits.packing_limit is not None:
            limit, reason = _shorter_rows(config)
            traits = replace(traits, packing_limit=limit, packing_reason=reason or traits.packing_reason)
        unmet = tiny_of(config).unmet
        if unmet:  # what longer rows would reach is not known either
            kinds = replace(traits.kinds, unreached=frozenset())
            traits = replace(traits, runs_by_samples=False, kinds=kinds)
        if unmet and (traits.packing_limit is None or min(unmet.values()) < traits.packing_limit):
            reason = f"no trial has rows of as many tokens as {_named(unmet)}"
            traits = replace(traits, packing_limit=int(min(unmet.values())), packing_reason=reason)
        return traits


def self_check(config: Any) -> None:
    """Compare loss and all gradients of a block-major run with plain `loss.backward()`, in float32, on a tiny instance.

    Two micro-batches of one sample each, in rows of one length as in a step, are compared with one batch of both. Compared are
    the model's own loss and auxiliary loss. The samples are of unequal length.

    Raises:
        ModelError: they differ; the message names the parameter and both numbers.
    """
    check_architecture(config)
    with _words_for_its_errors(config):
        reason = _self_check(cast(Hashable, type(config)), architecture_key(config))
        if reason:
            reason += _with_a_gradient(config) or _to_do(config)
    if reason:
        raise ModelError(f"{type(config).__name__}: cannot be trained block by block: {reason}")


def _with_a_gradient(config: Any) -> str:
    """Return words about an input of blocks, made before them, that has a gradient besides hidden states: it would be lost."""
    runner = tiny_runner(type(config), architecture_key(config))
    _, _, *names = inspect.signature(type(runner.blocks[0]).forward).parameters
    for call in runner.prologue(tiny_samples(runner.model)[0]).calls:
        for name, value in (*zip(names, call.args, strict=False), *call.kwargs.items()):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                return f"; its blocks get {name}, {tuple(value.shape)}, besides hidden states, whose gradient is not computed"
    return ""


def _to_do(config: Any) -> str:
    """Return what to change where one number of the configuration is the reason: with 0 in its place all agrees."""
    values = json.loads(architecture_key(config))
    for name, value in values.items():
        if isinstance(value, float) and value:
            try:
                gone = not _self_check(cast(Hashable, type(config)), json.dumps(values | {name: 0.0}, sort_keys=True))
            except Exception:  # the architecture's own code may not accept 0
                continue
            if gone:
                return f"; with {name} 0 instead of {value:g} they agree: set it so in config.json to train without it"
    return ""


def _shorter_rows(config: Any) -> tuple[int, str]:
    """Return the number of tokens below which samples in one row stay apart, where longer rows do not keep them apart, and why.

    Each number of the configuration that the trial's rows exceed is moved out of their way in turn.
    """
    met = tiny_of(config).met

    def stay_apart(unreached: set[str]) -> bool:
        try:
            return _probe(cast(Hashable, type(config)), key_without(config, unreached)).packing_limit is None
        except HeadraceError:  # the number is a size, not a count of tokens: no other value runs
            return False

    movable = {name for name in met if _can_move(config, name)}
    if not movable or not stay_apart(movable):
        return 0, ""
    decisive = {name: met[name] for name in movable if not stay_apart(movable - {name})}
    if not decisive or not stay_apart(set(decisive)):
        return 0, ""
    return int(min(decisive.values())), f"in rows that reach {_named(decisive)} samples see each other"


def _can_move(config: Any, name: str) -> bool:
    try:
        tiny_runner(type(config), key_without(config, {name}))
    except HeadraceError:
        return False
    return True


def _named(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in sorted(numbers.items()))


@contextmanager
def _words_for_its_errors(config: Any) -> Iterator[None]:
    """Turn whatever a model's own code raises while it runs block by block into the reason why it cannot be run so."""
    try:
        yield
    except ModelError:
        # Shared parameters come first: with them no trial would help.
        skeleton = build_skeleton(config, torch.bfloat16)
        refuse_shared_between_blocks(skeleton, find_blocks(skeleton).name)
        raise
    except HeadraceError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(config).__name__}: cannot be run block by block: its own code raises {in_one_line(error)}; blocks may "
            "pass on more than hidden states"
        ) from error


@lru_cache(maxsize=64)
def _probe(config_class: type, key: str) -> Traits:
    runner = tiny_runner(config_class, key)
    _check_hidden_states(runner)
    _check_causal(runner)
    reason, by_masks = _check_packing(runner), False
    if reason:
        runner.packs_by_masks = True
        by_masks = not _check_packing(runner)
        runner.packs_by_masks = False
    runner.samples_from = 0
    alone = not _check_packing(runner)
    exactly = alone and _padding_decides(runner)
    runner.samples_from = None
    return Traits(
        find_blocks(runner.model).name,
        runner.tuple_length,
        frozenset(_epilogue_names(runner)),
        packing_limit=0 if reason and not by_masks else None,
        packing_reason="" if by_masks else reason,
        packs_by_masks=by_masks,
        runs_by_samples=alone,
        by_exact_lengths=exactly,
        has_aside_loss=runner.collects_asides,
        passed_over=_passed_over(runner),
        kinds=_kinds(runner),
        head_by_rows=takes_head_by_rows(runner),
    )


def _kinds(runner: Runner) -> Kinds:
    samples = [sample for seed in range(1, 1 + _INPUTS) for sample in tiny_samples(runner.model, seed)]
    losses = (partial(plain_loss, runner, [sample]) for sample in samples)
    return find_kinds(runner.model, find_blocks(runner.model).name, losses)


def _epilogue_names(runner: Runner) -> set[str]:
    """Return the parameters that have a gradient from after the blocks and none from before them."""
    sample = tiny_samples(runner.model)[0]
    first = runner.prologue(sample).hidden
    if first.requires_grad:
        first.square().sum().backward()  # type: ignore[no-untyped-call]
    before = _names_with_gradient(runner.model)
    runner.model.zero_grad()
    final = first.detach().requires_grad_()
    runner.loss_sum(sample.input_ids, final, shift_labels(sample.labels)).backward()  # type: ignore[no-untyped-call]
    if final.grad is None:
        raise ModelError(f"{type(runner.model).__name__}: the loss does not depend on the last block's hidden states")
    return _names_with_gradient(runner.model) - before


def _names_with_gradient(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


@torch.no_grad()
def _run_blocks(runner: Runner, batch: MicroBatch) -> torch.Tensor:
    start = runner.prologue(batch)
    hidden = start.hidden
    for index, call in enumerate(start.calls):
        hidden = runner.block(index, hidden, call).hidden
    return hidden


@torch.no_grad()
def _passed_over(runner: Runner) -> frozenset[frozenset[str]]:
    """Return parameter names of the blocks that give the same result with nothing in place of what others hand them."""
    start = runner.prologue(tiny_samples(runner.model)[0])
    hidden, takes = start.hidden, set[frozenset[str]]()
    idle = set[frozenset[str]]()
    for index, call in enumerate(start.calls):
        left = runner.block(index, hidden, call).hidden
        if call.gets:
            names = parameter_names(runner.blocks[index])
            try:
                without = runner.run_block(runner.blocks[index], hidden, call.args, call.kwargs)
                same = torch.equal(without[0] if isinstance(without, tuple) else without, left)
            except Exception:  # the architecture's own code meets something that is no tensor
                same = False
            (idle if same else takes).add(names)
        hidden = left
    return frozenset(idle - takes)


def _check_hidden_states(runner: Runner) -> None:
    """Raise `ModelError` unless what goes from block to block is one state, or several, for each position of each row."""
    sample = tiny_samples(runner.model)[0]
    found = runner.prologue(sample).hidden.shape
    if found[:2] != sample.input_ids.shape:
        raise ModelError(
            f"{type(runner.model).__name__}: cannot be run block by block. For {tuple(sample.input_ids.shape)} tokens its "
            f"blocks get hidden states of {tuple(found)}, and only those that begin with (rows, tokens) are known"
        )


def _check_causal(runner: Runner) -> None:
    """Raise `ModelError` if a token changes what earlier positions compute."""
    sample = tiny_samples(runner.model)[0]
    other = sample.input_ids.clone()
    other[:, -1] = torch.where(other[:, -1] == 2, 3, 2)
    seen, changed = (_run_blocks(runner, MicroBatch(ids, ids))[:, :-1] for ids in (sample.input_ids, other))
    difference = float((seen - changed).abs().max())
    if difference > 1e-4 * float(seen.abs().max()):
        raise ModelError(
            f"{type(runner.model).__name__}: the last token changes earlier positions by {difference:.2g}; "
            "only causal (left-to-right) models can be fine-tuned; set is_decoder if the configuration has it"
        )


def _padding_decides(runner: Runner) -> bool:
    """Return whether samples give other results where they are padded to the length of another one in their group."""
    one, other = (sample.input_ids for sample in tiny_samples(runner.model))
    rows = [[one, other], [other, other.flip(1), other[:, : LENGTHS[0] - LENGTHS[1]]]]
    positions = torch.stack([torch.cat([torch.arange(ids.shape[1]) for ids in row]) for row in rows])
    ids = torch.cat([torch.cat(row, dim=1) for row in rows])
    grouped = _run_blocks(runner, MicroBatch(ids, ids, None, positions))
    alone = torch.cat([torch.cat([_run_blocks(runner, MicroBatch(ids, ids)) for ids in row], dim=1) for row in rows])
    return float((grouped - alone).abs().max()) > _ROUNDING * float(alone.abs().max())


def _check_packing(runner: Runner) -> str:
    """Say why samples packed into one row with restarting positions do not stay apart; "" if they do."""
    samples = tiny_samples(runner.model)
    ids = torch.cat([sample.input_ids for sample in samples], dim=1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    try:
        packed = _run_blocks(runner, MicroBatch(ids, ids, None, positions))
    except Exception as error:  # the architecture's own code, on positions and masks that it may not take
        return f"positions cannot be given: {in_one_line(error)}"
    alone = torch.cat([_run_blocks(runner, MicroBatch(one.input_ids, one.labels)) for one in samples], dim=1)
    difference = float((packed - alone).abs().max())
    if difference > 1e-4 * float(alone.abs().max()):
        return f"samples in one row see each other: block outputs differ by {difference:.2g}"
    return ""


@lru_cache(maxsize=64)
def _self_check(config_class: type, key: str) -> str:
    runner = tiny_runner(config_class, key)
    _check_hidden_states(runner)
    model = runner.model
    samples = [_filled_up(sample) for sample in tiny_samples(model)]
    expected_loss = plain_loss(runner, samples)
    expected_loss.backward()  # type: ignore[no-untyped-call]
    expected = take_gradients(model)
    loss, expected_value = block_major_backward(runner, samples), float(expected_loss.detach())
    if abs(loss - expected_value) > RELATIVE_TOLERANCE * abs(expected_value):
        return f"loss {loss:.6f} block by block, {expected_value:.6f} plainly"
    return differing_gradient(model, expected)


def _filled_up(sample: MicroBatch) -> MicroBatch:
    """Return a sample padded to a row as long as the longest sample."""
    more = (0, max(LENGTHS) - sample.input_ids.shape[1])
    pad = nn.functional.pad
    mask = pad(torch.ones_like(sample.input_ids), more, value=0)
    return MicroBatch(pad(sample.input_ids, more, value=0), pad(sample.labels, more, value=IGNORED), mask)
