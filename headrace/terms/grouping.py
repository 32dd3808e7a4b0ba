"""In which groups a step's sums are taken: of a plan, only this decides the bits of a run (docs/decisions/0013)."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Grouping:
    """Rows of a micro-batch, tokens of a chunk of the loss, and threads of compute, which share out matrix products.

    `head_rows` are the rows of the head that the loss takes at a time; 0: all, as in runs that began before there were ranges.
    """

    rows: int
    loss_chunk_tokens: int
    compute_threads: int
    head_rows: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Grouping":
        """Inverse of `to_json`."""
        return cls(**{name: int(value) for name, value in values.items()})
