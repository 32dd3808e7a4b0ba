"""The wire of a model that only runs: nothing is trained, and no gradient travels."""

from headrace.terms.layout import UnitLayout
from headrace.update.wires.dense import DenseWire


class FrozenWire(DenseWire):
    """Nothing is trained: an engine can evaluate, and take no step."""

    name = "frozen"

    def trained(self, unit: int, layout: UnitLayout, *, is_block: bool) -> UnitLayout | None:
        """Return None."""
        return None
