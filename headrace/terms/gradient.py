"""What the user chooses about how gradients travel: how a wire is named, with its settings (each wire is a file in
`update/wires/`).
"""

from dataclasses import dataclass

from headrace.terms.named import Named


@dataclass(frozen=True, kw_only=True)
class GradientWay(Named):
    """A way for gradients to travel. Its settings are the fields of a subclass, declared as options are."""

    def begun(self, way: "GradientWay") -> "GradientWay":
        """Return the way with which a run was begun that was asked for this one. `way` is what the run recorded, which may say
        more: what this one leaves to the plan.
        """
        return self
