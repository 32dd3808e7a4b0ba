"""The weights of a block come in parts while it runs: those of a linear module are there while it computes, and only then.

What autograd saves of a part is packed as a place in it, and looked up again in backward. Then the part comes again, if another
one has its slot. So slots may be refilled while the block's graph lives. Hooks see weights alone (decision 0005): anything else
that is saved stays as it is.

Invariant: an operator reads the same numbers as with whole blocks, so the bits are the same. `why_not_cut` tries that for an
architecture.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from headrace.model.adapter_targets import is_linear
from headrace.model.banks import find_experts
from headrace.model.binding import parameter_owners
from headrace.model.chain import Chain
from headrace.model.instance import tiny_samples
from headrace.model.probe import tiny_runner
from headrace.model.thresholds import architecture_key
from headrace.terms.block_parts import PART_SLOTS, BlockParts
from headrace.terms.errors import ConfigError, StepFailed, in_one_line
from headrace.terms.forms import SSD, Form
from headrace.terms.layout import UnitLayout, cut_out
from headrace.terms.sizes import round_up

# Parameters begin at multiples of so many elements of a slot.
_ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter of a part: the attribute that has it, where it begins in its unit and in a slot, and its shape."""

    attribute: str
    offset: int
    in_slot: int
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements of the parameter."""
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True, eq=False)
class Part:
    """The weights of a module, which has no modules of its own. `elements` are those that it takes of a slot."""

    module: nn.Module
    weights: tuple[Weight, ...]

    @property
    def elements(self) -> int:
        """Elements of a slot."""
        return max(round_up(each.in_slot + each.num_elements, _ALIGNMENT) for each in self.weights)

    @classmethod
    def of(cls, module: nn.Module, offsets: Mapping[str, int]) -> "Part":
        """Return the part of a module whose parameters begin at these elements of their unit."""
        weights, at = [], 0
        for attribute, parameter in module.named_parameters(recurse=False):
            weights.append(Weight(attribute, offsets[attribute], at, tuple(parameter.shape)))
            at += round_up(parameter.numel(), _ALIGNMENT)
        return cls(module, tuple(weights))


@dataclass(frozen=True)
class _Saved:
    """What autograd saved of a part, which comes from `flat`."""

    part: Part
    flat: Tensor
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class PartSlots:
    """Slots where compute reads parts, filled by `copy(into, source)`. They belong to one thread at a time.

    `num_copied` counts the elements that came.
    """

    def __init__(self, slots: Sequence[Tensor], copy: Callable[[Tensor, Tensor], None]) -> None:
        self._slots, self._copy = list(slots), copy
        self._held: list[tuple[Part, Tensor] | None] = [None] * len(self._slots)
        self._used: list[int] = list(range(len(self._slots)))  # the slot that was used longest ago comes first
        self.num_copied = 0

    def bring(self, part: Part, flat: Tensor) -> Tensor:
        """Return the slot that has a part of a unit, whose weights in host memory are `flat`. Bring it, if none has it."""
        slot = next((slot for slot, held in enumerate(self._held) if held is not None and held[0] is part), -1)
        if slot < 0:
            slot = self._used[0]
            self._held[slot] = None
            for each in part.weights:
                into = self._slots[slot][each.in_slot :][: each.num_elements]
                self._copy(into, flat[each.offset :][: each.num_elements])
                self.num_copied += each.num_elements
            self._held[slot] = part, flat
        self._used.remove(slot)
        self._used.append(slot)
        return self._slots[slot]

    def place_of(self, tensor: Tensor) -> _Saved | None:
        """Return where a tensor lies in a part that is here; None where it lies elsewhere."""
        at = tensor.data_ptr()
        for slot, held in zip(self._slots, self._held, strict=True):
            offset, size = at - slot.data_ptr(), slot.numel() * slot.element_size()
            if 0 <= offset < size and tensor.device == slot.device:
                if held is None or tensor.dtype != slot.dtype:
                    found = f"a weight of a part was saved as {tensor.dtype}, and is {slot.dtype}"
                    raise StepFailed(f"{found}: this block cannot come in parts")
                return _Saved(*held, offset // slot.element_size(), tuple(tensor.shape), tensor.stride())
        return None

    @contextmanager
    def coming(self, parts: Sequence[Part], flat: Tensor) -> Iterator[None]:
        """Have the modules of `parts` compute in this context with weights that come from `flat`, in host memory."""

        def pack(tensor: Tensor) -> Tensor | _Saved:
            return self.place_of(tensor) or tensor

        def unpack(saved: Tensor | _Saved) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            slot = self.bring(saved.part, saved.flat)
            return slot.as_strided(saved.shape, saved.stride, slot.storage_offset() + saved.offset)

        with ExitStack() as stack:
            for part in parts:
                self._attend(part, flat, stack)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
            yield

    def _attend(self, part: Part, flat: Tensor, stack: ExitStack) -> None:
        """Have a part there while its module runs, until `stack` is closed."""
        away = {each.attribute: part.module._parameters[each.attribute] for each in part.weights}

        def arrive(module: nn.Module, args: Any) -> None:
            slot = self.bring(part, flat)
            for each in part.weights:
                view = slot.detach()[each.in_slot :][: each.num_elements].view(each.shape)
                module._parameters[each.attribute] = nn.Parameter(view, requires_grad=False)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            module._parameters.update(away)

        # Hooks that read the weights, as adapters' do, were there before: they run between these.
        before = part.module.register_forward_pre_hook(arrive, prepend=True)
        after = part.module.register_forward_hook(leave, always_call=True)
        stack.callback(before.remove)
        stack.callback(after.remove)
        stack.callback(part.module._parameters.update, away)


@dataclass(frozen=True)
class CutBlocks:
    """The parts of a chain's blocks, by unit, and what is left of each unit that has some."""

    parts: tuple[tuple[Part, ...], ...]
    rests: tuple[UnitLayout, ...]
    figures: BlockParts

    @classmethod
    def of(cls, chain: Chain) -> "CutBlocks | None":
        """Return the parts of a chain's blocks; None where no block has any."""
        owners = parameter_owners(chain.model)
        parts: list[tuple[Part, ...]] = []
        rests: list[UnitLayout] = []
        runs, moved = [], []
        for unit, layout in enumerate(chain.layouts):
            found: dict[nn.Module, dict[str, int]] = {}
            names: dict[nn.Module, list[str]] = {}
            for spec in layout.parameters if 1 <= unit <= chain.num_blocks else ():
                (module, attribute), *others = owners[spec.name]
                if is_linear(module) and not others:
                    found.setdefault(module, {})[attribute] = spec.offset
                    names.setdefault(module, []).append(spec.name)
            whole = [module for module in found if len(found[module]) == len(list(module.parameters()))]
            cut = frozenset(name for module in whole for name in names[module])
            rest, left = cut_out(layout, cut) if cut else (layout, ())
            parts.append(tuple(Part.of(module, found[module]) for module in whole))
            rests.append(rest)
            runs.append(left)
            moved.append(sum(each.num_elements for part in parts[-1] for each in part.weights))
        if not any(parts):
            return None
        largest = max(part.elements for unit in parts for part in unit)
        return cls(tuple(parts), tuple(rests), BlockParts(rest=tuple(runs), elements=largest, moved=tuple(moved)))


def cut_blocks(chain: Chain, parts: BlockParts | None) -> CutBlocks | None:
    """Return the blocks of a chain in the `parts` of a plan; None where they come whole.

    Raises:
        ConfigError: the plan has other parts.
    """
    if parts is None:
        return None
    cut = CutBlocks.of(chain)
    if cut is None or cut.figures != parts:
        raise ConfigError(
            "plan: its blocks come in other parts than those of this model; give the plan of a run like this, or none"
        )
    return cut


def block_parts(chain: Chain, forms: Sequence[Form]) -> BlockParts | None:
    """Return how the blocks of a chain, whose units have these forms, can come in parts; None where they cannot.

    Blocks of mixtures do not: their experts come one at a time.
    """
    blocks = [form.figures for form in forms[1 : chain.num_blocks + 1]]
    whole = any(unit.in_place or unit.is_made or unit.is_far or unit.home != SSD for unit in blocks)
    if whole or not chain.replayable or any(find_experts(chain.model, chain.runner.blocks)) or why_not_cut(chain.config):
        return None
    cut = CutBlocks.of(chain)
    return cut.figures if cut else None


def why_not_cut(config: Any) -> str:
    """Return why blocks of the architecture of `config` cannot come in parts; "" where they can."""
    return _cutting_check(cast(Hashable, type(config)), architecture_key(config))


@lru_cache(maxsize=64)
def _cutting_check(config_class: type, key: str) -> str:
    runner = tiny_runner(config_class, key)
    model = runner.model.requires_grad_(False)
    samples = tiny_samples(model)
    try:
        expected = [found for sample in samples for found in _results(model, sample.input_ids)]
        parts, flats = _parts_of(runner.blocks)
        if not any(parts):
            return "its blocks have no linear modules"
        largest = max(part.elements for unit in parts for part in unit)
        slots = PartSlots([torch.empty(largest, dtype=torch.float32) for _ in range(PART_SLOTS)], _copy)
        with ExitStack() as stack:
            for unit, flat in zip(parts, flats, strict=True):
                stack.enter_context(slots.coming(unit, flat))
            made = [found for sample in samples for found in _results(model, sample.input_ids)]
    except Exception as error:  # whatever code raises that reads a weight elsewhere than in its module
        return in_one_line(error)
    same = all(torch.equal(one, other) for one, other in zip(expected, made, strict=True))
    return "" if same else "its gradients differ where blocks come in parts"


def _parts_of(blocks: Sequence[nn.Module]) -> tuple[list[list[Part]], list[Tensor]]:
    """Return the parts of tiny blocks, which have no weights any more, and the weights of each."""
    parts, flats = [], []
    for block in blocks:
        found, pieces, at = [], [torch.empty(0, dtype=torch.float32)], 0
        for module in filter(is_linear, block.modules()):
            offsets = {}
            for attribute, parameter in list(module.named_parameters(recurse=False)):
                offsets[attribute], at = at, at + parameter.numel()
                pieces.append(parameter.detach().flatten())
                module._parameters[attribute] = nn.Parameter(parameter.to("meta"), requires_grad=False)
            if offsets:
                found.append(Part.of(module, offsets))
        parts.append(found)
        flats.append(torch.cat(pieces))
    return parts, flats


def _copy(into: Tensor, source: Tensor) -> None:
    into.copy_(source)


def _results(model: Any, ids: Tensor) -> list[Tensor]:
    """Return the logits of a row, and the gradient of its embedding."""
    hidden = model.get_input_embeddings()(ids).detach().requires_grad_()
    out = model(inputs_embeds=hidden, use_cache=False).logits
    out.backward(torch.cos(out.detach()))
    assert hidden.grad is not None
    return [out.detach(), hidden.grad]
