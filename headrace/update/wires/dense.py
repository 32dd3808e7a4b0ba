"""The plain wire: a unit's whole gradient, which has the unit's own elements. Full fine-tuning."""

from typing import ClassVar

from headrace.terms.options.gradient import GradientWay
from headrace.update.wires.wire import Wire


class Dense(GradientWay):
    """Whole gradients. It has no settings. Where memory is short, a run begins with those of tables by rows."""

    name: ClassVar[str] = "dense"

    def begun(self, way: GradientWay) -> GradientWay:
        """See `GradientWay.begun`."""
        return way if way.name == "rows" else self


class DenseWire(Wire):
    """Everything is trained, in place."""

    ways = (Dense,)
