"""The plain wire: a unit's whole gradient, which has the unit's own elements. Full fine-tuning."""

from typing import ClassVar

from headrace.terms.gradient import GradientWay
from headrace.update.wire import Wire


class Dense(GradientWay):
    """Whole gradients. It has no settings."""

    name: ClassVar[str] = "dense"


class DenseWire(Wire):
    """Everything is trained, in place."""

    ways = (Dense,)
