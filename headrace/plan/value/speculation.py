"""What a plan gains by starting updates before the norm is known: a value, and in words."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What a plan with deferred updates would gain by speculating, in the simulator's seconds; the buffers are the same.

    A step takes `deferred_seconds` as planned, and `hit_seconds` where updates start at once and no gradient has to be clipped.
    Where one has to be clipped, it takes `redo_seconds` more, because the updates are done again. `late_units` are those of the
    speculative plan.
    """

    late_units: tuple[int, ...]
    deferred_seconds: float
    hit_seconds: float
    redo_seconds: float

    @property
    def break_even(self) -> float:
        """The share of steps that must be hits for speculation to be as fast as waiting: above 1 if it never is."""
        return 1 - (self.deferred_seconds - self.hit_seconds) / self.redo_seconds

    def explain(self) -> str:
        """Return what clipping costs under each policy, and when the engine uses which, in words."""
        costs = (
            f"{self.deferred_seconds:.3g} s a step if updates wait for the norm; if they do not, "
            f"{self.hit_seconds:.3g} s, and {self.redo_seconds:.3g} s more where a gradient is clipped"
        )
        if self.break_even >= 1:
            return f"{costs}: they wait"
        return f"{costs}: they wait until more than {max(0.0, self.break_even):.0%} of the last steps were not clipped"
