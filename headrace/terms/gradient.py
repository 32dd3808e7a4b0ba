"""What the user chooses about how gradients travel: how a wire is named, with its settings (each wire is a file in
`update/wires/`).
"""

from dataclasses import dataclass
from typing import ClassVar

from headrace.terms.declared import Declaration, Declared
from headrace.terms.optimizer import optimizer_text


@dataclass(frozen=True, kw_only=True)
class GradientWay(Declared):
    """A way for gradients to travel. Its settings are the fields of a subclass, declared as options are."""

    name: ClassVar[str] = ""
    """What `--gradient` calls it."""

    @classmethod
    def settings(cls) -> tuple[Declaration, ...]:
        """Return the declarations of its settings."""
        return cls.declarations()

    def begun(self, way: "GradientWay") -> "GradientWay":
        """Return the way with which a run was begun that was asked for this one. `way` is what the run recorded, which may say
        more: what this one leaves to the plan.
        """
        return self

    @property
    def text(self) -> str:
        """The way and those of its settings that have another value than their default, as `--gradient` takes them."""
        found = {each.key: getattr(self, each.key) for each in self.settings() if getattr(self, each.key) != each.default}
        return optimizer_text(
            self.name, {key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in found.items()}
        )
