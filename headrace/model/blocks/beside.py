"""What blocks compute with beside their own frozen weights: adapters of matrices, tables of rows.

A kind is a class of its own. Its tensors are float32, and lie in one flat range for each unit; they are bound unit by unit, as
weights are (`binding`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from headrace.model.blocks.binding import GradientSink, hand_over
from headrace.terms.errors import StepFailed
from headrace.terms.layout import UnitLayout, part


@dataclass(frozen=True, kw_only=True)
class BesideKind(ABC):
    """One kind of modules beside those of a model.

    Attributes:
        seed: what their first numbers are drawn from.
        layouts: where the tensors of a unit lie, by unit; their names begin with that of the module that they are beside.
        notes: what a person should know about which modules have none, and about their files.
    """

    seed: int
    layouts: Mapping[int, UnitLayout]
    notes: tuple[str, ...] = ()
    _bound: dict[str, nn.Parameter] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, by name, in the order of a file."""
        return {spec.name: spec.shape for layout in self.layouts.values() for spec in layout.parameters}

    def tensors(self, unit: int, flat: Tensor) -> dict[str, Iterable[np.ndarray]]:
        """Return a unit's tensors by name, as arrays that follow one another; `flat` is laid out by `layouts`."""
        return {spec.name: [part(flat, spec).numpy()] for spec in self.layouts[unit].parameters}

    @property
    def dropout(self) -> float:
        """The share of inputs that they do not see in a step."""
        return 0.0

    @abstractmethod
    def install(self, model: nn.Module) -> Callable[[], None]:
        """Let the modules of `model` add what is computed beside them; return the function that undoes it."""

    @abstractmethod
    def first(self, unit: int, layout: UnitLayout, weights: Mapping[str, Tensor], into: Tensor) -> None:
        """Fill `into`, laid out by `layout`, with a unit's initial numbers. `weights` are the unit's own, by parameter."""

    @abstractmethod
    def merge(self, unit: int, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Merge `tensors`, given by name, into `weights`, a unit's own by parameter, in place."""

    @abstractmethod
    def merging_bytes(self, unit: int) -> int:
        """Return the bytes that `merge` allocates at once for a unit."""

    def bind(self, unit: int, layout: UnitLayout, flat: Tensor, sink: GradientSink | None) -> None:
        """Make the tensors of `unit` views of `flat` (float32), laid out by `layout`; `sink` gets their gradients."""
        for spec in layout.parameters if unit in self.layouts else ():
            parameter = nn.Parameter(part(flat.detach(), spec).view(spec.shape), requires_grad=sink is not None)
            if sink is not None:
                parameter.register_post_accumulate_grad_hook(hand_over(spec, sink))  # type: ignore[no-untyped-call]
            self._bound[spec.name] = parameter

    def release(self, unit: int) -> None:
        """Forget what the tensors of `unit` are views of."""
        for spec in self.layouts[unit].parameters if unit in self.layouts else ():
            self._bound.pop(spec.name, None)

    def bound(self, name: str, *ends: str) -> list[nn.Parameter]:
        """Return the tensors `NAME.END` of the module `name`.

        Raises:
            StepFailed: they are not bound.
        """
        try:
            return [self._bound[f"{name}.{end}"] for end in ends]
        except KeyError:
            raise StepFailed(f"{name}: runs while its adapter is not bound; bind it with its unit") from None


@dataclass(frozen=True)
class StoredBeside:
    """What is computed beside blocks, and its tensors (float32) by unit, flat as `adapters.layouts` says."""

    adapters: BesideKind
    flats: Mapping[int, Tensor]

    def bind(self, device: torch.device) -> None:
        """Bind all of them, on `device`."""
        for unit, layout in self.adapters.layouts.items():
            self.adapters.bind(unit, layout, self.flats[unit].to(device), None)
