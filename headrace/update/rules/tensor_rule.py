"""Rules that need whole rows or whole matrices: what they have in common.

A subclass says what becomes of a stack of items, in torch operations that serve host and device. Items are rows or matrices
(`terms.cuts`); the rule is given the items of one parameter at a time. What is no item (biases, norms, embeddings that
`RuleFigures.elementwise` names, padding) is updated by another rule over the same planes.

Invariant: an item's new value depends on the item, its gradient and the scalars alone: not on the chunk, the piece or the
thread. Bits are the same on every device if each operation rounds once (`tensors`); sums are taken by `tree_sum`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.terms.errors import ConfigError
from headrace.terms.layout import ItemRange
from headrace.terms.rule_figures import Grain, RuleFigures
from headrace.update.rules.rule import ElementRule, StepScalars, UpdateRule
from headrace.update.rules.tensors import Scalars, Updated, update_tensors


class TensorRule(ABC):
    """A rule under which the new values of a whole row or matrix follow from it, its states, its gradient and some scalars.

    `planes.states` begin with the rest of the master, if there is one; then come the rule's own. `alone` updates all elements
    outside of rows and matrices, and has the same planes. It is None if vectors are items, too (`RuleFigures.takes_vectors`):
    then there are no such elements.

    Raises:
        ConfigError: the planes differ, or have blocks of elements that share a number, or the grain is the element.
    """

    def __init__(self, figures: RuleFigures, alone: ElementRule | None) -> None:
        planes, name = (alone.planes, alone.figures.name) if alone else (figures.planes, "none")
        is_known = (alone is None) == figures.takes_vectors
        if figures.grain is Grain.ELEMENT or planes != figures.planes or planes.block_elements > 1 or not is_known:
            raise ConfigError(
                f"{figures.name}: a rule of rows or matrices must say that grain, and have the planes of the rule of "
                f"elements alone, with a number for each element. Found grain {figures.grain}, and {name}"
            )
        self.figures, self.planes = figures, figures.planes
        # Another rule updates elements outside of rows and matrices: see `UpdateRule.apply`.
        self.apply = alone.apply if alone else self._none_is_alone
        self.apply_to_tensors = alone.apply_to_tensors if alone else self._none_is_alone

    def _none_is_alone(self, *_: Any, **__: Any) -> None:
        raise ConfigError(f"update: {self.figures.name} updates whole rows or matrices, and was given elements")

    @abstractmethod
    def scalars(self, step: StepScalars, weight_decay: float, learning_rate_scale: float) -> Scalars:
        """Return the scalars for `on_items`, in double precision."""

    @abstractmethod
    def on_items(self, p: Tensor, gradient: Tensor, states: Sequence[Tensor], scalars: Scalars) -> Updated:
        """Return the new fp32 `p` and `states`. All have the shape (items, rows, columns), with one row where rows are items.

        `scalars` are exactly representable in fp32; `gradient` is fp32. It may allocate `temporary_bytes` per element.
        """

    @property
    def sums(self) -> bool:
        """Whether checksums are taken on the way: they are not, so the store takes them."""
        return False

    @torch.no_grad()
    def apply_to_items(
        self, weight: Tensor, states: tuple[Tensor, ...], gradient: Tensor, step: StepScalars, items: ItemRange
    ) -> None:
        """Update the items of `items` in place, on their device. Shapes: `(n,)`; types as in `UpdateRule.apply_to_tensors`.

        Raises:
            ConfigError: only a part of an item is given; nothing is changed then.
        """
        self.refuse_parts(weight, items)
        shape = (-1, items.rows, items.columns)
        scalars = np.array(self.scalars(step, items.weight_decay, items.learning_rate_scale), np.float32).tolist()

        def update(p: Tensor, own: Sequence[Tensor]) -> Updated:
            return self.on_items(p, gradient.view(shape).to(torch.float32), own, scalars)

        own = [state.view(shape) for state in states if state.numel()]  # planes of elements alone have nothing here
        new_weight, new_states = update_tensors(weight.view(shape), own, update)
        weight.view(shape).copy_(new_weight)
        for state, new in zip(own, new_states, strict=True):
            state.copy_(new.view(state.dtype))

    def refuse_parts(self, weight: Tensor, items: ItemRange) -> None:
        """Raise ConfigError unless `weight` has whole items."""
        if weight.numel() % items.item_elements:
            raise ConfigError(
                f"{self.figures.name}: {weight.numel()} elements are no whole items of {items.rows} x {items.columns}"
            )


def items_rule(rule: UpdateRule) -> TensorRule:
    """Return `rule`, which updates whole rows or matrices.

    Raises:
        ConfigError: it updates elements alone.
    """
    if not isinstance(rule, TensorRule):
        raise ConfigError(f"update: {rule.figures.name} updates elements alone, and was given rows or matrices")
    return rule


def item_shares(items: ItemRange, most_elements: int) -> Iterator[ItemRange]:
    """Yield `items` in parts of at most `most_elements` elements, but at least one item."""
    step = max(1, most_elements // items.item_elements) * items.item_elements
    for begin in range(items.start, items.stop, step):
        yield replace(items, start=begin, stop=min(begin + step, items.stop))


def tree_sum(values: Tensor) -> Tensor:
    """Return the sums of items `(n, rows, columns)` as `(n, 1, 1)`, added in one order on any device and with any threads.

    Halves are added element by element until one number is left, so that each addition is rounded once.
    """
    flat = values.flatten(1)
    while (count := flat.shape[1]) > 1:
        half = count // 2
        added = flat[:, :half] + flat[:, half : 2 * half]
        flat = torch.cat([added, flat[:, 2 * half :]], dim=1) if count % 2 else added
    return flat.view(-1, 1, 1)
