"""The wire of a model that only runs: nothing is trained, and no gradient travels."""

from collections.abc import Sequence

from headrace.terms.forms import Form
from headrace.terms.layout import UnitLayout
from headrace.update.wires.wire import Wire


class FrozenWire(Wire):
    """Nothing is trained: an engine can evaluate, and take no step."""

    name = "frozen"

    def trained(self, unit: int, layout: UnitLayout, *, is_block: bool) -> UnitLayout | None:
        """Return None."""
        return None

    def refuse_forms(self, forms: Sequence[Form], train: str) -> None:
        """Refuse nothing."""
