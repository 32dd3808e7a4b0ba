"""What a step is: its tokens, and what of its order is given."""

from dataclasses import dataclass

from headrace.terms.errors import InputError
from headrace.terms.grouping import Grouping
from headrace.terms.options.summing import SEQUENTIAL
from headrace.terms.packed_rows import PackedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a step is: tokens, in rows of `sequence_length`; `clip`: whether the global norm must be known before updates.

    `grouping`: the groups in which sums are taken, where the planner may not choose them. `packed`: the rows with which the
    run begins, where they are known. `head_passes`: 2 with a loss of the whole step.
    """

    tokens_per_step: int
    sequence_length: int
    clip: bool
    checkpoint_every: int | None = None
    grouping: Grouping | None = None
    gradient_sum: str = SEQUENTIAL
    packed: PackedRows | None = None
    head_passes: int = 1

    def __post_init__(self) -> None:
        if self.sequence_length < 1 or self.tokens_per_step < 1:
            raise InputError(
                f"tokens_per_step and sequence_length must be positive, found {self.tokens_per_step} and {self.sequence_length}"
            )
        if self.tokens_per_step % self.sequence_length:
            low = self.tokens_per_step // self.sequence_length * self.sequence_length
            raise InputError(
                f"tokens_per_step {self.tokens_per_step} is not a multiple of sequence_length {self.sequence_length}; "
                f"use {max(low, self.sequence_length)} or {low + self.sequence_length}"
            )

    @property
    def sequences(self) -> int:
        """Rows of a step."""
        return self.tokens_per_step // self.sequence_length
