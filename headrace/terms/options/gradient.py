"""What the user chooses about how gradients travel: how a wire is named, with its settings (each wire is a file in
`update/wires/`).
"""

from dataclasses import dataclass
from typing import ClassVar

from headrace.terms.options.named import Named


@dataclass(frozen=True, kw_only=True)
class GradientWay(Named):
    """A way for gradients to travel. Its settings are the fields of a subclass, declared as options are.

    `named_by` is the option that names it. `gradient_dtype` is that of drained gradients where nobody says; None: as compute.
    `offer` is what a plan says to those who could have it instead of whole gradients; "": nothing.
    """

    named_by: ClassVar[str] = "gradient"
    gradient_dtype: ClassVar[str | None] = None
    offer: ClassVar[str] = ""

    def begun(self, way: "GradientWay") -> "GradientWay":
        """Return the way with which a run was begun that was asked for this one. `way` is what the run recorded, which may say
        more: what this one leaves to the plan.
        """
        return self
