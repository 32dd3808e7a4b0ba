"""Which weights of a chain's blocks come in parts, and whether an architecture allows it.

Invariant: an operator reads the same numbers as with whole blocks, so the bits are the same. `why_not_cut` tries that for an
architecture.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from headrace.machine.cpu import CpuMachine
from headrace.model.adapters.adapter_targets import is_linear
from headrace.model.blocks.binding import GradientSink, parameter_owners
from headrace.model.chain.chain import Chain
from headrace.model.parts.banks import find_experts
from headrace.model.parts.part_slots import ModulePart, PartSlots
from headrace.model.parts.runner import Runner
from headrace.model.trials.instance import tiny_samples
from headrace.model.trials.trial import run_back, tried, unless_alike, why_other
from headrace.terms.block_parts import PART_SLOTS, BlockParts
from headrace.terms.errors import ConfigError
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


@tried
def why_not_cut(runner: Runner, *, trained: bool = False) -> str:
    """Return why blocks of an architecture cannot come in parts, or be `trained` so; "" where they can."""
    model = runner.model.requires_grad_(trained)
    if not any(is_linear(module) for block in runner.blocks for module in block.modules()):
        return "its blocks have no linear modules"
    rows = [sample.input_ids for sample in tiny_samples(model)]
    whole = partial(run_back, model, embedded=True)

    def by_parts() -> list[dict[str, Tensor]]:
        parts, flats = _parts_of(runner.blocks, {id(parameter): name for name, parameter in model.named_parameters()})
        largest = max(part.elements for unit in parts for part in unit)
        memory = [torch.empty(largest, dtype=torch.float32) for _ in range(PART_SLOTS)]
        slots = PartSlots(memory, CpuMachine(separate_device=True))
        found = list[dict[str, Tensor]]()
        with ExitStack() as stack:
            caught: dict[str, Tensor] = {}
            catch = _sink(caught) if trained else None
            for unit, flat in zip(parts, flats, strict=True):
                stack.enter_context(slots.coming(unit, flat, (lambda spec: catch) if catch else None))
            for ids in (*rows, *rows):  # twice: what follows a part is known, and so comes ahead, from the second time on
                caught.clear()
                found.append(whole(ids) | caught)
        return found

    return why_other(
        lambda: [whole(ids) for ids in rows] * 2, by_parts, unless_alike("its gradients differ where blocks come in parts")
    )


def _sink(caught: dict[str, Tensor]) -> GradientSink:
    """Return a hook that stores each gradient in `caught`. A second one is an error: a sum of two could round differently."""

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
