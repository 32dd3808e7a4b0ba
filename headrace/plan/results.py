"""What was found of a plan's choices: peaks, operations, notes."""

from dataclasses import dataclass, field
from typing import Any

from headrace.plan.speculation import Speculation
from headrace.terms.sizes import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What was found of a plan's choices: they follow from it, the model and the budgets, and choose nothing themselves.

    `peak_bytes` is by tier and purpose, `allowed_bytes` by tier. Operations are those of one micro-batch: `forward_flops` by
    unit, `attention_flops` by block (those of the forward's that are attention's products), `epilogue_flops` of its forward,
    `spared_flops` by block (of a recompute, by replaying and skipping). `speculation` is set where clipping allows a choice.
    """

    peak_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    allowed_bytes: dict[str, int] = field(default_factory=dict)
    forward_flops: tuple[float, ...] = ()
    attention_flops: tuple[float, ...] = ()
    epilogue_flops: float = 0.0
    spared_flops: tuple[float, ...] = ()
    speculation: Speculation | None = None
    notes: tuple[str, ...] = ()

    def explain_peaks(self) -> list[str]:
        """Return the peaks in one line for each tier."""
        lines = []
        for tier, rows in self.peak_bytes.items():
            allowed = self.allowed_bytes.get(tier)
            of = f" of {format_bytes(allowed)}" if allowed else ""
            parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in rows.items() if size)
            lines.append(f"{tier:<8} {format_bytes(sum(rows.values()))}{of}: {parts}")
        return lines

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Results":
        """Inverse of `dataclasses.asdict`, of which JSON has made lists."""
        known = dict(values)
        for name in ("forward_flops", "attention_flops", "spared_flops", "notes"):
            known[name] = tuple(known[name])
        if speculation := known["speculation"]:
            known["speculation"] = Speculation(**{**speculation, "late_units": tuple(speculation["late_units"])})
        return cls(**known)
