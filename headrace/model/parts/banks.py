"""Expert banks replace a model's stacked experts, so that its own loop stops at an expert that is not in memory.

Transformers computes a mixture by a loop over the experts that tokens were sent to, one `weights[expert]` after another. A
`Bank` takes the place of such a stack of weights. Indexed with an expert, it returns that expert's weights. If they are not in
memory, the thread that runs the block waits for them. The experts that will be asked for are known before the first is: they
are the integers that the module is called with.

Invariant: only some modules have banks (`bank_check`). Trials must have seen them ask for one expert at a time, in ascending
order, and only for announced ones.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from headrace.model.blocks.binding import Bound, parameter_owners
from headrace.terms.errors import ModelError
from headrace.terms.layout import UnitLayout

Weights = Mapping[str, Any]  # tensors, or what answers products in their place


@dataclass(frozen=True, slots=True)
class BlockExperts:
    """The experts of a block: `module` owns stacked parameters; `names` are those of the layouts, by attribute."""

    module: nn.Module
    names: Mapping[str, str]
    num_experts: int


@dataclass(frozen=True)
class ExpertPlaces:
    """Where weights of experts lie: in a slot by an expert's `own` layout, by unit and number, in their whole unit by that of
    `units`. `blocks` (from unit 1) name them. Those that stay in their codes `others` give.
    """

    blocks: Sequence[BlockExperts | None]
    own: Sequence[Sequence[UnitLayout]]
    units: Sequence[UnitLayout] = ()
    others: Mapping[int, Sequence[Bound]] = field(default_factory=dict)

    def names(self, unit: int) -> frozenset[str]:
        """Return the names of a unit's parameters that are experts."""
        return frozenset(spec.name for own in self.own[unit][:1] for spec in own.parameters)

    def views(self, unit: int, expert: int, flat: torch.Tensor, *, whole: bool = False) -> dict[str, Any]:
        """Return an expert's weights by attribute, as views of its own slot, or of a plane of the whole unit."""
        block = self.blocks[unit - 1]
        assert block is not None, "the unit has experts"
        if unit in self.others:
            bound = dict(self.others[unit][expert](flat))
            return {attribute: bound[name] for attribute, name in block.names.items()}
        stacks = {spec.name: spec.offset for spec in self.units[unit].parameters} if whole else {}
        specs, found = {spec.name: spec for spec in self.own[unit][expert].parameters}, {}
        for attribute, name in block.names.items():
            spec = specs[name]
            start = stacks[name] + expert * spec.num_elements if whole else spec.offset
            found[attribute] = flat[start : start + spec.num_elements].view(spec.shape)
        return found


class Visitor(Protocol):
    """What runs a block."""

    def announce(self, experts: Mapping[int, int]) -> None:
        """Take which experts will be asked for, ascending, and for how many tokens. Called before the first is."""

    def wait_for(self, expert: int) -> None:
        """Return when the expert may be there; this is called again if it is not."""


class Walker:
    """What runs a block in a thread, which `park` stops until it is told to go on.

    `needs` are the experts that it will ask for, ascending; `wants` is the one for which it waits.
    """

    def __init__(self, park: Callable[[], None]) -> None:
        self.needs, self.wants = tuple[int, ...](), -1
        self._park = park

    def announce(self, experts: Mapping[int, int]) -> None:
        """See `Visitor`."""
        self.needs = tuple(experts)

    def wait_for(self, expert: int) -> None:
        """See `Visitor`."""
        self.wants = expert
        self._park()


def needed_by(walkers: Iterable[Walker]) -> tuple[int, ...]:
    """Return the experts that any walker needs, ascending."""
    return tuple(sorted({expert for walker in walkers for expert in walker.needs}))


_W = TypeVar("_W", bound=Walker)


class _BankThread(threading.local):
    """What runs blocks in this thread."""

    visitor: Visitor | None = None


class Banks:
    """Banks in the place of the experts of blocks, from `install` to `remove`.

    `present` are the weights that are there, by the expert's number and then by the attribute of their module. They are of the
    one block that is being computed. The code that runs blocks sets and empties it.
    """

    def __init__(self, experts: Sequence[BlockExperts | None], dtype: torch.dtype, device: torch.device) -> None:
        self.present: dict[int, Weights] = {}
        self._experts, self._dtype, self._device = tuple(each for each in experts if each is not None), dtype, device
        self._own = _BankThread()
        self._hooks: list[Any] = []

    def install(self) -> None:
        """Put banks where experts stood; the parameters, which have no weights, are kept for `remove`."""
        for experts in self._experts:
            module = experts.module
            for attribute in experts.names:
                shape = getattr(module, attribute).shape
                vars(module)[attribute] = Bank(self, attribute, shape, self._dtype, self._device)
            self._hooks.append(module.register_forward_pre_hook(self._announcing(experts.num_experts), with_kwargs=True))

    def remove(self) -> None:
        """Put everything back."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for experts in self._experts:
            for attribute in experts.names:
                vars(experts.module).pop(attribute, None)

    def visit(self, visitor: Visitor | None) -> None:
        """Note that blocks are run by `visitor` in this thread from here on."""
        self._own.visitor = visitor

    def expert(self, number: int, attribute: str) -> Any:
        """Return the weights of an expert once they are there."""
        while (weights := self.present.get(number)) is None:
            visitor = self._own.visitor
            if visitor is None:
                raise ModelError(f"expert {number} is asked for, and nothing is there to load it")
            visitor.wait_for(number)
        return weights[attribute]

    def let_pass(self, weights: Mapping[int, Weights], walkers: Sequence[_W], go_on: Callable[[_W], bool]) -> list[_W]:
        """Bring experts to walkers that wait for one of them, in their order; return those that are still in the block.

        `go_on` lets one run until it waits again or has passed the block, and returns whether it has. Experts come ascending.
        """
        self.present.update(weights)
        try:
            return [walker for walker in walkers if not (walker.wants in self.present and go_on(walker))]
        finally:
            self.present.clear()

    def _announcing(self, num_experts: int) -> Callable[..., None]:
        def announce(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._own.visitor is not None:
                self._own.visitor.announce(_chosen((*args, *kwargs.values()), num_experts))

        return announce


class Bank:
    """What stands where a parameter (experts, ...) stood: `bank[expert]` are one expert's weights."""

    __slots__ = ("_attribute", "_banks", "device", "dtype", "shape")

    def __init__(self, banks: Banks, attribute: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self._banks, self._attribute = banks, attribute
        self.shape, self.dtype, self.device = shape, dtype, device

    def __getitem__(self, index: Any) -> Any:
        single = isinstance(index, int) or (
            isinstance(index, torch.Tensor) and index.numel() == 1 and index.dim() == 0 and not index.is_floating_point()
        )
        if not single:
            raise ModelError(f"experts are asked for by {index!r}, not one at a time")
        return self._banks.expert(int(index), self._attribute)


def find_experts(model: nn.Module, blocks: Sequence[nn.Module]) -> tuple[BlockExperts | None, ...]:
    """Return the experts of each block: the only module whose parameters all have the same leading size, one slice per
    expert. None where there is none, or where there are several such modules.
    """
    names = {(id(module), attribute): name for name, places in parameter_owners(model).items() for module, attribute in places}
    found = []
    for block in blocks:
        stacks = [each for module in block.modules() if (each := _stacks(module, names)) is not None]
        found.append(stacks[0] if len(stacks) == 1 else None)
    return tuple(found)


def _stacks(module: nn.Module, names: Mapping[tuple[int, str], str]) -> BlockExperts | None:
    own = {attribute: parameter for attribute, parameter in module._parameters.items() if parameter is not None}
    counts = {parameter.shape[0] if parameter.dim() > 1 else 0 for parameter in own.values()}
    if len(counts) != 1 or max(parameter.dim() for parameter in own.values()) != 3:
        return None
    (count,) = counts
    # A convolution has as many weights as channels along its row, but no experts.
    if count < 2 or isinstance(module, nn.modules.conv._ConvNd):
        return None
    return BlockExperts(module, {attribute: names[id(module), attribute] for attribute in own}, count)


def chosen_among(values: Sequence[Any]) -> torch.Tensor | None:
    """Return which experts tokens are sent to: the first tensor of integers among the arguments of a module of experts."""
    integers = (torch.int64, torch.int32)
    return next((value for value in values if isinstance(value, torch.Tensor) and value.dtype in integers), None)


def _chosen(values: Sequence[Any], num_experts: int) -> dict[int, int]:
    """Return the experts that tokens are sent to, ascending, and how often each; a number beyond the experts means none."""
    chosen = chosen_among(values)
    if chosen is None:
        return {}
    found, counts = torch.unique(chosen, return_counts=True)
    pairs = zip(found.tolist(), counts.tolist(), strict=True)
    return {expert: count for expert, count in pairs if 0 <= expert < num_experts}
