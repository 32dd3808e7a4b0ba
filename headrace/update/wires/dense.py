"""The plain wire: a unit's whole gradient, which has the unit's own elements. Full fine-tuning."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from torch import Tensor

from headrace.terms.gradient import GradientWay
from headrace.terms.layout import ParameterSpec, UnitLayout
from headrace.update.wire import Caught, Gradients


class Dense(GradientWay):
    """Whole gradients. It has no settings."""

    name: ClassVar[str] = "dense"


class DenseWire:
    """Everything is trained, in place."""

    name = "dense"

    def trained(self, unit: int, layout: UnitLayout, *, is_block: bool) -> UnitLayout | None:
        """Return `layout`."""
        return layout

    @contextmanager
    def catch(self, unit: int, layout: UnitLayout, weights: Tensor, gradients: Gradients) -> Iterator[Caught]:
        """Take every gradient as it is."""

        def sink(spec: ParameterSpec, gradient: Tensor) -> None:
            gradients.add(spec.name, gradient)

        yield Caught(sink, lambda spec: True)

    def first_weights(self, unit: int, layout: UnitLayout, trained: UnitLayout, weights: Tensor) -> Tensor:
        """Refuse: there is no trained family of its own."""
        raise AssertionError("what is trained in place has no weights of its own")

    def complete(self, unit: int, layout: UnitLayout, slot: Tensor, trained: UnitLayout, weights: Tensor) -> None:
        """Refuse: there is no trained family of its own."""
        raise AssertionError("what is trained in place has no weights of its own")

    def making_bytes(self, layout: UnitLayout) -> int:
        """Return 0: no slot is made."""
        return 0
