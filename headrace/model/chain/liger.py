"""Liger's fused kernels for the norms, gated products and rotations of blocks, on a GPU.

Liger patches models in place, classes and functions of transformers included. Here it may patch, its changes are recorded, and
everything is put back; a block wears the changes for the time of one call. So the skeleton, the tiny instances and other models
of this process stay what they are. Liger's loss is not used: the epilogue's own works in chunks.

Nothing is replayed. A dispatch mode does not see these kernels, and they write into their arguments. The rotation overwrites
the projections' outputs, so a kept output would be rotated twice.
"""

import contextlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from headrace.model.blocks.chain_values import MicroBatch
from headrace.model.parts.runner import Runner, run_block
from headrace.model.trials.block_major import compare_gradients
from headrace.model.trials.instance import tiny_samples
from headrace.model.trials.trial import tried
from headrace.terms.errors import ConfigError

# What is replaced, by Liger's own names. All else that it can replace, above all losses, is switched off.
_WANTED = frozenset({"rope", "rms_norm", "swiglu", "geglu"})

# What a module wears: attributes of the instance that hide those of its class.
_Worn = Mapping[nn.Module, Mapping[str, Any]]


class LigerBlocks:
    """Runs the blocks of `model` with Liger's kernels, in the place of `run_block`.

    Raises:
        ConfigError: the package is not there, or has nothing for this architecture.
    """

    def __init__(self, model: Any, blocks: Sequence[nn.Module]) -> None:
        apply = _liger_functions().get(model.config.model_type)
        self._worn = _changes_by(apply, model, blocks) if apply else {}
        if not any(self._worn.values()):
            raise ConfigError(
                f"liger: the installed liger_kernel replaces nothing in the blocks of {type(model).__name__} "
                f"(model_type {model.config.model_type!r}); leave liger out"
            )

    def __call__(self, block: nn.Module, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `block` on hidden states (b, T, hidden)."""
        with _wearing(self._worn[block]):
            return run_block(block, hidden, args, kwargs)

    def describe(self) -> str:
        """Return which modules of a block are changed, such as "LlamaMLP, 2 LlamaRMSNorm"."""
        worn = max(self._worn.values(), key=len)
        counts = Counter(type(module).__name__ for module in worn)
        return ", ".join(name if count == 1 else f"{count} {name}" for name, count in sorted(counts.items()))


def check_liger(config: Any, device: torch.device) -> None:
    """Compare loss and gradients of a tiny instance on `device` with and without Liger's kernels.

    Raises:
        ConfigError: no GPU, no package, nothing in it for this architecture, or they differ; the message says which.
    """
    if device.type != "cuda":
        raise ConfigError(f"liger: its kernels run on a GPU, but this run computes on the {device.type}; leave liger out")
    _liger_functions()
    reason = _why_not(config, str(device))
    if reason:
        raise ConfigError(f"liger: with its kernels {type(config).__name__} computes something else: {reason}; leave liger out")


@tried
def _why_not(runner: Runner, device: str) -> str:
    runner.model.to(device)
    samples = [
        MicroBatch(one.input_ids.to(device), one.labels.to(device), torch.ones_like(one.input_ids, device=device))
        for one in tiny_samples(runner.model)
    ]
    return compare_gradients(runner, LigerBlocks(runner.model, runner.blocks), samples)


def _liger_functions() -> Mapping[str, Callable[..., None]]:
    """Return Liger's patching functions by model type."""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN  # the package is optional
    except ImportError as error:
        raise ConfigError(
            f"liger: the package liger_kernel cannot be used ({error}); pip install liger-kernel, or leave liger out"
        ) from error
    functions: Mapping[str, Callable[..., None]] = MODEL_TYPE_TO_APPLY_LIGER_FN
    return functions


def _changes_by(apply: Callable[..., None], model: Any, blocks: Sequence[nn.Module]) -> dict[nn.Module, _Worn]:
    """Let `apply` patch `model`, put everything back, and return what it changed in each block."""
    source = vars(sys.modules[type(model).__module__])
    names, attributes = dict(source), {module: dict(vars(module)) for module in model.modules()}
    options = {name: name in _WANTED for name in inspect.signature(apply).parameters if name != "model"}
    try:
        apply(model=model, **options)
        functions = {name: value for name, value in _changes(source, names).items() if inspect.isroutine(value)}
        return {block: _worn_by(block, attributes, functions) for block in blocks}
    finally:
        _put_back(source, names)
        for module, known in attributes.items():
            _put_back(vars(module), known)


def _worn_by(
    block: nn.Module, attributes: Mapping[nn.Module, Mapping[str, Any]], functions: Mapping[str, Callable[..., Any]]
) -> _Worn:
    worn: dict[nn.Module, Mapping[str, Any]] = {}
    for module in block.modules():
        changes = _changes(vars(module), attributes[module])
        forward = type(module).forward
        if "forward" not in changes and isinstance(forward, FunctionType) and functions.keys() & set(forward.__code__.co_names):
            changes["forward"] = MethodType(_with_globals(forward, functions), module)
        if changes:
            worn[module] = changes
    return worn


def _with_globals(function: FunctionType, changes: Mapping[str, Any]) -> FunctionType:
    """Return `function` with `changes` among its globals: a rotation is a global of the model's code."""
    names = {**function.__globals__, **changes}
    changed = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed


def _changes(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in now.items() if name not in before or before[name] is not value}


def _put_back(now: dict[str, Any], before: Mapping[str, Any]) -> None:
    for name in _changes(now, before):
        if name in before:
            now[name] = before[name]
        else:
            del now[name]


@contextlib.contextmanager
def _wearing(worn: _Worn) -> Iterator[None]:
    before = {module: dict(vars(module)) for module in worn}
    for module, changes in worn.items():
        vars(module).update(changes)
    try:
        yield
    finally:
        for module, known in before.items():
            _put_back(vars(module), known)
