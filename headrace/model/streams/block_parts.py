"""Which weights of a chain's blocks come in parts, and whether an architecture allows it.

Invariant: an operator reads the same numbers as with whole blocks, so the bits are the same. `why_not_cut` tries that for an
architecture.
"""

from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from headrace.machine.cpu import CpuMachine
from headrace.model.adapters.adapter_targets import is_linear
from headrace.model.blocks.binding import GradientSink, parameter_owners
from headrace.model.chain.chain import Chain
from headrace.model.parts.banks import find_experts
from headrace.model.parts.part_slots import ModulePart, PartSlots
from headrace.model.trials.instance import tiny_samples
from headrace.model.trials.probe import tiny_runner
from headrace.model.trials.thresholds import architecture_key
from headrace.terms.block_parts import PART_SLOTS, BlockParts
from headrace.terms.errors import ConfigError, in_one_line
from headrace.terms.forms import SSD, Form
from headrace.terms.layout import ParameterSpec, UnitLayout, cut_out


@dataclass(frozen=True)
class CutBlocks:
    """The parts of a chain's blocks, by unit, and what is left of each unit that has some."""

    parts: tuple[tuple[ModulePart, ...], ...]
    rests: tuple[UnitLayout, ...]
    figures: BlockParts

    @classmethod
    def of(cls, chain: Chain) -> "CutBlocks | None":
        """Return the parts of a chain's blocks; None where no block has any."""
        owners = parameter_owners(chain.model)
        parts: list[tuple[ModulePart, ...]] = []
        rests: list[UnitLayout] = []
        runs, moved = [], []
        for unit, layout in enumerate(chain.layouts):
            found: dict[nn.Module, dict[str, ParameterSpec]] = {}
            for spec in layout.parameters if 1 <= unit <= chain.num_blocks else ():
                (module, attribute), *others = owners[spec.name]
                if is_linear(module) and not others:
                    found.setdefault(module, {})[attribute] = spec
            whole = [module for module in found if len(found[module]) == len(list(module.parameters()))]
            cut = frozenset(spec.name for module in whole for spec in found[module].values())
            rest, left = cut_out(layout, cut) if cut else (layout, ())
            parts.append(tuple(ModulePart.of(unit, module, found[module]) for module in whole))
            rests.append(rest)
            runs.append(left)
            moved.append(sum(each.spec.num_elements for part in parts[-1] for each in part.weights))
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
    whole = any(unit.is_made or unit.is_far or unit.home != SSD for unit in blocks)
    if whole or not chain.replayable or any(find_experts(chain.model, chain.runner.blocks)):
        return None
    if why_not_cut(chain.config, trained=any(unit.in_place for unit in blocks)):
        return None
    cut = CutBlocks.of(chain)
    return cut.figures if cut else None


def why_not_cut(config: Any, *, trained: bool = False) -> str:
    """Return why blocks of the architecture of `config` cannot come in parts, or be `trained` so; "" where they can."""
    return _cutting_check(cast(Hashable, type(config)), architecture_key(config), trained)


@lru_cache(maxsize=64)
def _cutting_check(config_class: type, key: str, trained: bool) -> str:
    runner = tiny_runner(config_class, key)
    model = runner.model.requires_grad_(trained)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    samples = tiny_samples(model)
    try:
        expected = [_results(model, sample.input_ids, {}) for sample in samples]
        parts, flats = _parts_of(runner.blocks, names)
        if not any(parts):
            return "its blocks have no linear modules"
        largest = max(part.elements for unit in parts for part in unit)
        memory = [torch.empty(largest, dtype=torch.float32) for _ in range(PART_SLOTS)]
        slots = PartSlots(memory, CpuMachine(separate_device=True))
        caught: dict[str, Tensor] = {}
        catch = _sink(caught) if trained else None
        with ExitStack() as stack:
            for unit, flat in zip(parts, flats, strict=True):
                stack.enter_context(slots.coming(unit, flat, (lambda spec: catch) if catch else None))
            # Twice: what follows a part is known, and so comes ahead, from the second time on.
            made = [_results(model, sample.input_ids, caught) for _ in range(2) for sample in samples]
    except Exception as error:  # whatever code raises that reads a weight elsewhere than in its module
        return in_one_line(error)
    for one, other in zip([*expected, *expected], made, strict=True):
        if one.keys() != other.keys() or not all(torch.equal(one[name], other[name]) for name in one):
            return "its gradients differ where blocks come in parts"
    return ""


def _sink(caught: dict[str, Tensor]) -> GradientSink:
    """Return what notes gradients of parts in `caught`: one of each, as sums of several may be rounded in another way."""

    def take(spec: ParameterSpec, gradient: Tensor) -> None:
        if spec.name in caught:
            raise ConfigError(f"{spec.name} has several gradients")
        caught[spec.name] = gradient

    return take


def _parts_of(blocks: Sequence[nn.Module], names: dict[int, str]) -> tuple[list[list[ModulePart]], list[Tensor]]:
    """Return the parts of tiny blocks, which have no weights any more, and the weights of each. `names` are by parameter."""
    parts, flats = [], []
    for unit, block in enumerate(blocks, start=1):
        found, pieces, at = [], [torch.empty(0, dtype=torch.float32)], 0
        for module in filter(is_linear, block.modules()):
            specs = {}
            for attribute, parameter in list(module.named_parameters(recurse=False)):
                size = parameter.numel()
                specs[attribute] = ParameterSpec(names[id(parameter)], tuple(parameter.shape), at, size, 0)
                at += size
                pieces.append(parameter.detach().flatten())
                module._parameters[attribute] = nn.Parameter(parameter.to("meta"), requires_grad=False)
            if specs:
                found.append(ModulePart.of(unit, module, specs))
        parts.append(found)
        flats.append(torch.cat(pieces))
    return parts, flats


def _results(model: Any, ids: Tensor, caught: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the logits of a row, and the gradients of its embedding and of what is trained; those of parts are `caught`."""
    caught.clear()
    hidden = model.get_input_embeddings()(ids).detach().requires_grad_()
    out = model(inputs_embeds=hidden, use_cache=False).logits
    out.backward(torch.cos(out.detach()))
    assert hidden.grad is not None
    found = {"": out.detach(), " ": hidden.grad}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name], parameter.grad = parameter.grad, None
    return found | caught
