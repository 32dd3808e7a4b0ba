"""What a run takes its batches from: all samples tokenised beforehand (`stream.py`), or read as they come (`streamed.py`)."""

from collections.abc import Mapping
from typing import Any, Protocol

from headrace.data.values.tokens import TokenSet
from headrace.data.values.values import Batch, DataSpec
from headrace.terms.packed_rows import PackedRows


class Batches(Protocol):
    """Batches without end, and a position in them that a run commits with its weights.

    Invariant: after `restore(state)` come the batches that followed when `state()` was taken, bit for bit, or it raises.
    """

    @property
    def spec(self) -> DataSpec:
        """What the data were asked for."""

    @property
    def template_date(self) -> str | None:
        """The day that the chat template was told; None if it does not ask."""

    @property
    def notices(self) -> tuple[str, ...]:
        """Notes for the person who trains on the data."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """What was cut, dropped and skipped so far, if it was not known before."""

    @property
    def held_out(self) -> TokenSet | None:
        """The samples that are evaluated and never trained; None if there are none."""

    @property
    def by_earlier_rules(self) -> bool:
        """Whether the tokens were made by earlier rules, with which the run began."""

    @property
    def steps_per_epoch(self) -> float | None:
        """Steps of the first epoch; None if nobody knows."""

    def epochs_ended(self, steps: int) -> int:
        """Return how many epochs, each as long as the first one, end within so many steps; 0 if nobody knows."""

    def first_rows(self, steps: int) -> PackedRows:
        """Return the lengths of the samples in the rows of the first of so many steps."""

    def next_batch(self) -> Batch:
        """Return the next step's rows and move on."""

    def state(self) -> dict[str, Any]:
        """Return the position, as a value that JSON can hold."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to the position where `state` was taken."""
