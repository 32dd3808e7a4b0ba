"""How much of its drives' rated life a run uses.

Drives wear by the bytes written to them, and makers warrant a number of bytes (TBW). Data are striped over the drives in
proportion to their bandwidth. So the drive that wears out first is the one with the least rating for its share; that one is
reported. Only bytes that the program writes are counted. What the drive itself adds (write amplification) is part of the
rating's test method, and large sequential writes such as these stay below that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.terms.machine.drives import Drive, striped_shares
from headrace.terms.plain_figures import plain_figure
from headrace.terms.sizes import format_seconds
from headrace.terms.tables import figures

# Nearly all TLC drives for desktops are warranted for 600 TB per TB of capacity; data-centre drives for three times as much.
TYPICAL_WRITES_OF_CAPACITY = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endurance:
    """What a run writes. Shares and lives are those of the drive that wears out first.

    `rating_is_typical` says that the drive's rating is not known, and the typical one was taken.
    """

    written_bytes_per_step: float
    num_steps: int
    step_seconds: float
    drive: int
    drive_written_bytes: float
    drive_rated_bytes: float
    rating_is_typical: bool

    @property
    def written_bytes(self) -> float:
        """Bytes that the run writes, over all drives."""
        return self.written_bytes_per_step * self.num_steps

    @property
    def written_terabytes(self) -> float:
        """Terabytes (10^12 bytes, the unit of ratings) that the run writes, over all drives."""
        return self.written_bytes / 1e12

    @property
    def run_seconds(self) -> float:
        """Seconds that the run takes."""
        return self.step_seconds * self.num_steps

    @property
    def run_hours(self) -> float:
        """Hours that the run takes."""
        return self.run_seconds / 3600

    @property
    def share_of_rating(self) -> float:
        """Share of the drive's rated life that the run uses: 0.1 is a tenth, above 1 is more than is warranted."""
        return self.drive_written_bytes / self.drive_rated_bytes

    @property
    def steps_in_rating(self) -> float:
        """Steps until a new drive has reached its rating; infinite if nothing is written."""
        return self.num_steps / self.share_of_rating if self.drive_written_bytes else math.inf

    def to_json(self) -> dict[str, float]:
        """Return the length of the run and what it uses, as reports have it."""
        known = figures(self, "num_steps", "run_hours", "written_terabytes")
        return known | {"share_of_endurance": self.share_of_rating}

    def explain(self) -> str:
        """Return the forecast in one line."""
        rating = f"{self.drive_rated_bytes / 1e12:.0f} TB, {'typical of its size' if self.rating_is_typical else 'rated'}"
        if not self.drive_written_bytes:
            return f"{format_seconds(self.run_seconds)} for {self.num_steps} steps; nothing is written to the SSDs"
        return (
            f"{format_seconds(self.run_seconds)} for {self.num_steps} steps; {plain_figure(self.written_terabytes)} TB "
            f"written, {self.share_of_rating:.1%} of the endurance of SSD {self.drive} ({rating}), "
            f"which lasts for {plain_figure(self.steps_in_rating)} such steps"
        )


def endurance(drives: Sequence[Drive], written_bytes_per_step: float, *, num_steps: int, step_seconds: float) -> Endurance:
    """Forecast the wear of `drives` by a run of `num_steps` steps.

    Raises:
        ValueError: no drives, or a number is negative or not finite, or there are no steps.
    """
    if not drives or num_steps < 1:
        raise ValueError(f"endurance: {len(drives)} drives and {num_steps} steps given; at least one of each is needed")
    if not (0 <= written_bytes_per_step < math.inf and 0 <= step_seconds < math.inf):
        raise ValueError(
            f"endurance: {written_bytes_per_step!r} bytes and {step_seconds!r} seconds per step given; "
            "both must be finite and not negative"
        )
    written = [written_bytes_per_step * num_steps * share for share in striped_shares(drives)]
    rated = [_rated_bytes(drive) for drive in drives]
    worst = max(range(len(drives)), key=lambda index: written[index] / rated[index])
    return Endurance(
        written_bytes_per_step=written_bytes_per_step,
        num_steps=num_steps,
        step_seconds=step_seconds,
        drive=worst,
        drive_written_bytes=written[worst],
        drive_rated_bytes=rated[worst],
        rating_is_typical=drives[worst].rated_endurance_bytes is None,
    )


def _rated_bytes(drive: Drive) -> float:
    if drive.rated_endurance_bytes is not None:
        return drive.rated_endurance_bytes
    return TYPICAL_WRITES_OF_CAPACITY * drive.capacity_bytes
