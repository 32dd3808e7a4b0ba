"""The kind of each parameter: a matrix, a weight that only scales, or one that no input reaches.

A tiny instance computes its loss on several inputs, and it is watched what its parameters are used for. Names tell nothing:
a projection may lie in a module called `norm`, and a norm may have a weight of two dimensions.
Invariant: an expert without tokens is not taken for one that nothing reaches: members of a list of modules are one.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.model.blocks.find_blocks import block_of
from headrace.terms.layout import FROZEN, SCALE

_MULTIPLIED = frozenset({torch.ops.aten.mul})
_NORMALISED = frozenset({torch.ops.aten.native_layer_norm, torch.ops.aten._fused_rms_norm, torch.ops.aten.native_group_norm})
_COPIED = frozenset({torch.ops.aten._to_copy, torch.ops.aten.clone})

# A parameter of any block like its own: the patterns of all names in such a block, and that of its own.
Key = tuple[frozenset[str], str]


@dataclass(frozen=True)
class Kinds:
    """What was found of parameters, by `Key`: which only scale, which have no gradient, and which the model itself keeps."""

    known: frozenset[Key]
    scales: frozenset[Key]
    unreached: frozenset[Key]
    kept: frozenset[Key]

    def of(self, model: nn.Module, blocks_name: str) -> dict[str, str]:
        """Return the kinds (`SCALE`, `FROZEN`) of those parameters of `model` whose shapes do not tell them, by name."""
        by_pattern: dict[str, set[str]] = defaultdict(set)
        for key in self.known:
            by_pattern[key[1]].add(self._kind(key))

        def kind(key: Key) -> str:
            if key in self.known:
                return self._kind(key)
            found = by_pattern[key[1]]  # of blocks unlike this one: they have to agree
            return next(iter(found)) if len(found) == 1 else ""

        return {name: found for name, key in keys_of(model, blocks_name).items() if (found := kind(key))}

    def _kind(self, key: Key) -> str:
        return FROZEN if key in self.unreached or key in self.kept else SCALE if key in self.scales else ""


NO_KINDS = Kinds(*[frozenset[Key]()] * 4)


def keys_of(model: nn.Module, blocks_name: str) -> dict[str, Key]:
    """Return the keys of a model's parameters, by name."""
    names = [name for name, _ in model.named_parameters()]
    patterns = {name: _pattern(model, name) for name in names}
    blocks: dict[int | None, set[str]] = defaultdict(set)
    for name in names:
        blocks[block_of(name, blocks_name)].add(patterns[name])
    alike = {block: frozenset(found) if block is not None else frozenset[str]() for block, found in blocks.items()}
    return {name: (alike[block_of(name, blocks_name)], patterns[name]) for name in names}


def find_kinds(model: nn.Module, blocks_name: str, losses: Iterable[Callable[[], torch.Tensor]]) -> Kinds:
    """Return what a tiny instance shows of its parameters, while it computes `losses` and their gradients."""
    model.zero_grad(set_to_none=True)
    uses = _ParameterUses({name: parameter for name, parameter in model.named_parameters() if parameter.dim() > 1})
    for loss in losses:
        with uses:
            value = loss()
        value.backward()  # type: ignore[no-untyped-call]
    keys, parameters = keys_of(model, blocks_name), dict(model.named_parameters())
    reached = {keys[name] for name, parameter in parameters.items() if parameter.grad is not None}
    others = {keys[name] for name in uses.others}
    model.zero_grad(set_to_none=True)
    return Kinds(
        known=frozenset(keys.values()),
        scales=frozenset(keys[name] for name in uses.scales) - others,
        unreached=frozenset(keys.values()) - reached,
        kept=frozenset(keys[name] for name, parameter in parameters.items() if not parameter.requires_grad),
    )


def _pattern(model: nn.Module, name: str) -> str:
    """Return a parameter's name with a star in the place of each index in a list of modules."""
    module: Any = model
    found = []
    for part in name.split("."):
        found.append("*" if isinstance(module, nn.ModuleList) else part)
        module = getattr(module, part)
    return ".".join(found)


class _ParameterUses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, notes which parameters only multiply element by element (`scales`), and which are used otherwise."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scales: set[str] = set()
        self.others: set[str] = set()
        self._names = {parameter.untyped_storage().data_ptr(): name for name, parameter in parameters.items()}
        self._copies: list[torch.Tensor] = []  # kept, so that nothing else gets their memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        results = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        for tensor in tensors:
            name = self._name(tensor)
            if name is None or not results or self._name(results[0]) == name:  # nothing, or another view of it
                continue
            if func.overloadpacket in _COPIED:
                self._names[results[0].untyped_storage().data_ptr()] = name
                self._copies.append(results[0])
            elif self._only_scales(func, tensor, tensors, results[0]):
                self.scales.add(name)
            else:
                self.others.add(name)
        return out

    def _name(self, tensor: torch.Tensor) -> str | None:
        return self._names.get(tensor.untyped_storage().data_ptr())

    @staticmethod
    def _only_scales(func: Any, weight: torch.Tensor, tensors: list[torch.Tensor], result: torch.Tensor) -> bool:
        if func.overloadpacket in _NORMALISED:
            return weight is not tensors[0]
        # A product of matrices may be written as one of elements, whose result is larger than the other factor.
        others = [each for each in tensors if each is not weight]
        return func.overloadpacket in _MULTIPLIED and len(others) == 1 and others[0].shape == result.shape
