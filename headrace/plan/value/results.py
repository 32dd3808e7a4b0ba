"""What is known about a plan's choices: peaks, operations, notes."""

from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.plan.value.speculation import Speculation
from headrace.terms.embedding_rows import BlockRows
from headrace.terms.packed_rows import Groups
from headrace.terms.sizes import format_bytes

# Where a run directory has its plan.
PLAN_NAME = "plan.json"
# The row of host memory with what it takes to write a checkpoint while steps go on.
SAVING_ROW = "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What was found about a plan's choices: it follows from them, the model and the budgets, and chooses nothing itself.

    `peak_bytes` is by tier and purpose, `allowed_bytes` by tier. Operations are those of one micro-batch. `forward_flops` are
    by unit; `attention_flops` by block, the part of its forward in attention's products. `epilogue_flops` are those of the
    epilogue's forward. `spared_flops` by block are those that replaying and skipping save. `speculation` is set where clipping
    allows a choice.
    `groups` is set where packed rows run in several groups of samples of one length. Operations count one call all the same.
    `tables` are those in blocks whose rows are read in the model's files.
    """

    peak_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    allowed_bytes: dict[str, int] = field(default_factory=dict)
    forward_flops: tuple[float, ...] = ()
    attention_flops: tuple[float, ...] = ()
    epilogue_flops: float = 0.0
    spared_flops: tuple[float, ...] = ()
    speculation: Speculation | None = None
    notes: tuple[str, ...] = ()
    groups: Groups | None = None
    tables: tuple[BlockRows, ...] = ()

    @property
    def saves_beside_steps(self) -> bool:
        """Whether there is memory to write a checkpoint while steps go on."""
        return SAVING_ROW in self.peak_bytes.get("host", {})

    def explain_peaks(self) -> list[str]:
        """Return the peaks in one line for each tier of which anything is used."""
        lines = []
        for tier, rows in self.peak_bytes.items():
            if not sum(rows.values()):
                continue
            allowed = self.allowed_bytes.get(tier)
            of = f" of {format_bytes(allowed)}" if allowed else ""
            parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in rows.items() if size)
            lines.append(f"{tier:<8} {format_bytes(sum(rows.values()))}{of}: {parts}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the results as plain JSON values, without groups and tables where there are none."""
        return {name: value for name, value in asdict(self).items() if name not in ("groups", "tables") or value}
