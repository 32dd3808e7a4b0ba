"""Rules that need whole rows or whole matrices: what they have in common.

A subclass says what becomes of a stack of items, in torch operations, on the host and on a device alike. Items are rows or
matrices (`terms.cuts`); of a chunk the rule is given one parameter's at a time. What is none (biases, norms, embeddings that
`RuleFigures.elementwise` names, padding) another rule updates, over the same planes.

Invariant: an item's new value depends on the item, its gradient and the scalars alone: not on the chunk, the piece or the
thread that has it. Bits are the same on every device if each operation rounds once (`tensors`): sums by `tree_sum`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.terms.errors import ConfigError
from headrace.terms.layout import ItemRange, PlaneSet
from headrace.terms.rule_figures import Grain, RuleFigures
from headrace.update.rule import ElementRule, StepScalars, UpdateRule
from headrace.update.tensors import States, update_tensors


class TensorRule(ABC):
    """A rule by which whole rows or matrices become what they, their gradients and some scalars say.

    `planes.states` begin with the rest of the master, if there is one, then come the rule's own. `alone` updates whatever is no
    row or matrix, and has the same planes; it is None where vectors are items, too (`RuleFigures.takes_vectors`), so that there
    is none.

    Raises:
        ConfigError: the planes differ, or have blocks of elements that share a number; or the grain is the element.
    """

    def __init__(self, figures: RuleFigures, alone: ElementRule | None) -> None:
        planes, name = (alone.planes, alone.figures.name) if alone else (figures.planes, "none")
        is_known = (alone is None) == figures.takes_vectors
        if figures.grain is Grain.ELEMENT or planes != figures.planes or planes.block_elements > 1 or not is_known:
            raise ConfigError(
                f"{figures.name}: a rule of rows or matrices says that grain, and has the planes of the rule of elements "
                f"alone, with a number for each element; found grain {figures.grain}, and {name}"
            )
        self._figures = figures
        # What is of no row or matrix another rule updates: see `UpdateRule.apply`.
        self.apply = alone.apply if alone else self._none_is_alone
        self.apply_to_tensors = alone.apply_to_tensors if alone else self._none_is_alone

    def _none_is_alone(self, *_: Any, **__: Any) -> None:
        raise ConfigError(f"update: {self._figures.name} updates whole rows or matrices, and was given elements")

    @abstractmethod
    def scalars(self, step: StepScalars, weight_decay: float, learning_rate_scale: float) -> tuple[float, ...]:
        """Return what `on_items` is given, in double precision."""

    @abstractmethod
    def on_items(
        self, p: Tensor, gradient: Tensor, states: Sequence[Tensor], scalars: tuple[float, ...]
    ) -> tuple[Tensor, States]:
        """Return the new fp32 `p` and `states`. Shapes of all: (items, rows, columns), with one row where rows are items.

        `scalars` are exactly representable in fp32; `gradient` is fp32. It may allocate `temporary_bytes` per element.
        """

    @property
    def figures(self) -> RuleFigures:
        """What those know of the rule who plan it."""
        return self._figures

    @property
    def planes(self) -> PlaneSet:
        """The planes that the rule reads and writes."""
        return self._figures.planes

    @property
    def sums(self) -> bool:
        """Whether checksums are taken on the way: they are not, the store takes them."""
        return False

    @torch.no_grad()
    def apply_to_items(
        self, weight: Tensor, states: tuple[Tensor, ...], gradient: Tensor, step: StepScalars, items: ItemRange
    ) -> None:
        """Update the items of `items` in place, on the device that they are on. Shapes: `(n,)`; types as `UpdateRule` has them.

        Raises:
            ConfigError: a part of an item; nothing is changed then.
        """
        if weight.numel() % items.item_elements:
            raise ConfigError(
                f"{self._figures.name}: {weight.numel()} elements are no whole items of {items.rows} x {items.columns}"
            )
        shape = (-1, items.rows, items.columns)
        scalars = np.array(self.scalars(step, items.weight_decay, items.learning_rate_scale), np.float32).tolist()

        def update(p: Tensor, own: Sequence[Tensor]) -> tuple[Tensor, States]:
            return self.on_items(p, gradient.view(shape).to(torch.float32), own, scalars)

        own = [state.view(shape) for state in states if state.numel()]  # of planes of elements alone there is nothing here
        new_weight, new_states = update_tensors(weight.view(shape), own, update)
        weight.view(shape).copy_(new_weight)
        for state, new in zip(own, new_states, strict=True):
            state.copy_(new.view(state.dtype))


def items_rule(rule: UpdateRule) -> TensorRule:
    """Return `rule`, which updates whole rows or matrices.

    Raises:
        ConfigError: it updates elements alone.
    """
    if not isinstance(rule, TensorRule):
        raise ConfigError(f"update: {rule.figures.name} updates elements alone, and was given rows or matrices")
    return rule


def item_shares(items: ItemRange, most_elements: int) -> Iterator[ItemRange]:
    """Yield `items` in parts of as many as have `most_elements`, at least one."""
    step = max(1, most_elements // items.item_elements) * items.item_elements
    for begin in range(items.start, items.stop, step):
        yield replace(items, start=begin, stop=min(begin + step, items.stop))


def tree_sum(values: Tensor) -> Tensor:
    """Return the sums of items `(n, rows, columns)` as `(n, 1, 1)`, added in one order whatever the device and the threads.

    Halves are added to one another until one number is left: element by element, so that each addition is rounded once.
    """
    flat = values.flatten(1)
    while (count := flat.shape[1]) > 1:
        half = count // 2
        added = flat[:, :half] + flat[:, half : 2 * half]
        flat = torch.cat([added, flat[:, 2 * half :]], dim=1) if count % 2 else added
    return flat.view(-1, 1, 1)
