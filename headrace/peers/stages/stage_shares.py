"""How busy stages were, as measured, beside the most that they could be (AxoNN).

The slowest of S stages computes t seconds for each of G groups, which take c seconds on a link. Where all are alike it is busy
at most for the share G t / (G t + (S-1)(t + 2c)) of a step (`pipeline.bound`). Invariant: all figures were measured since this
start of the run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.peers.stages.pipeline import most_busy_share


@dataclass
class StageShares:
    """Sums over steps: their `seconds`, and by stage what compute was `busy`. A group took `transfer_seconds` on the slowest
    link, without waiting. In the first step kernels compile, so it is left out once there are others.
    """

    steps: int = 0
    seconds: float = 0.0
    busy: list[float] = field(default_factory=list)
    transfer_seconds: float = 0.0

    def add(self, said: Sequence[Mapping[str, Any]], seconds: float) -> None:
        """Enter a step, and what each stage said of it: `compute_seconds` and `transfer_seconds`."""
        self.steps += 1
        own = [float(each["compute_seconds"]) for each in said]
        first = self.steps <= 2  # the second one takes the place of the first
        self.busy = own if first else [before + more for before, more in zip(self.busy, own, strict=True)]
        self.seconds = seconds if first else self.seconds + seconds
        self.transfer_seconds = max(float(each["transfer_seconds"]) for each in said)

    def to_json(self, groups: int) -> dict[str, Any] | None:
        """Return the figures of steps in so many groups; None if there are none."""
        if not self.steps or self.seconds <= 0:
            return None
        own = [each / max(1, self.steps - 1) / groups for each in self.busy]
        group_seconds, utilisation = max(own), max(self.busy) / self.seconds
        # Times vary, and `transfer_seconds` is that of the slowest link: what was measured was possible.
        most = max(utilisation, most_busy_share(own, self.transfer_seconds, groups)) if group_seconds else None
        return {
            "groups": groups,
            "busy_shares": [round(each / self.seconds, 4) for each in self.busy],
            "utilisation": round(utilisation, 4),
            "bound": None if most is None else round(most, 4),
            "group_seconds": round(group_seconds, 6),
            "transfer_seconds": round(self.transfer_seconds, 6),
        }
