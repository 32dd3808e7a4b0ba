"""What a run takes its batches from: all samples tokenised beforehand (`stream.py`), read as they come (`streamed.py`), or
prompts (`prompt_batches.py`). All of them have a `Cursor` in rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.data.values.packing import EpochRows
from headrace.data.values.tokens import TokenSet
from headrace.data.values.values import Batch, DataSpec
from headrace.terms.errors import DataError
from headrace.terms.packed_rows import PackedRows

_S = TypeVar("_S", bound="Stretch")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows that are laid out at once: an epoch, or a buffer of one."""

    rows: EpochRows


@dataclass(frozen=True, slots=True)
class Epoch(Stretch):
    """The rows of an epoch, and its number."""

    number: int


class Cursor(Generic[_S]):
    """The next row, number `row_index` of a stretch. `after` lays out what follows a stretch, or (of None) the first."""

    def __init__(self, after: Callable[[_S | None], _S]) -> None:
        self._after = after
        self._stretch: _S | None = None
        self.row_index = 0

    @property
    def begun(self) -> bool:
        """Whether a stretch was laid out."""
        return self._stretch is not None

    @property
    def stretch(self) -> _S:
        """The stretch of the next row."""
        if self._stretch is None:
            self._stretch = self._after(None)
        return self._stretch

    def go_to(self, stretch: _S, row_index: int) -> None:
        """Let row `row_index` of `stretch` be the next one."""
        self._stretch, self.row_index = stretch, row_index

    def take(self, count: int) -> Iterator[tuple[_S, NDArray[np.int64]]]:
        """Yield the next rows, each with its stretch, and move on."""
        for _ in range(count):
            if self.row_index == len(self.stretch.rows):
                self.go_to(self._after(self.stretch), 0)
            row = self.stretch.rows.row(self.row_index)
            self.row_index += 1
            yield self.stretch, row


class Batches(ABC):
    """Batches without end, and a position in them that a run commits with its weights.

    `spec` is what the data were asked for, `held_out` the samples that are evaluated and never trained.
    Invariant: after `restore(state)` come the batches that followed when `state()` was taken, bit for bit, or it raises.
    """

    by_earlier_rules = False
    """Whether the tokens were made by earlier rules, with which the run began."""

    def __init__(self, spec: DataSpec, held_out: TokenSet | None, step_rows: int, epoch_rows: int | None) -> None:
        """A step takes `step_rows`, of an epoch with `epoch_rows`; None if nobody knows."""
        self.spec, self.held_out = spec, held_out
        self._step_rows, self._epoch_rows = step_rows, epoch_rows

    @property
    @abstractmethod
    def notices(self) -> tuple[str, ...]:
        """Notes for the person who trains on the data."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """What was cut, dropped and skipped so far, if it was not known before."""
        return ()

    @property
    def steps_per_epoch(self) -> float | None:
        """Steps of the first epoch; None if nobody knows. Later ones are packed differently, and may differ by a few rows."""
        return self._epoch_rows and self._epoch_rows / self._step_rows

    def epochs_ended(self, steps: int) -> int:
        """Return how many epochs, each as long as the first one, end within so many steps; 0 if nobody knows."""
        return steps * self._step_rows // self._epoch_rows if self._epoch_rows else 0

    def first_rows(self, steps: int) -> PackedRows:
        """Return the lengths of the samples in the rows of the first of so many steps; none where nothing is packed."""
        return PackedRows(self.spec.sequence_length)

    @abstractmethod
    def next_batch(self) -> Batch:
        """Return the next step's rows and move on.

        Raises:
            DataError: the next rows cannot be read or trained on.
            CorruptData: the token cache is no longer what was written.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the position, as a value that JSON can hold."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to the position where `state` was taken.

        Raises:
            DataError: samples, order or options differ from that time, or `state` is no position in such data. The position
                stays what it was.
        """

    def _choices(self) -> dict[str, Any]:
        """Return what decides the order of rows, for a position."""
        spec = self.spec
        return {
            "sequence_length": spec.sequence_length,
            "seed": spec.seed,
            "packing": spec.packing,
            "shuffle": spec.shuffle,
            **({"weights": list(spec.weights)} if spec.weights else {}),
            **({"held_out_digest": self.held_out.info.digest} if self.held_out else {}),
        }


@contextmanager
def read_position(state: Mapping[str, Any], choices: Mapping[str, Any]) -> Iterator[None]:
    """Refuse a position in other data, and one that what follows cannot read.

    Raises:
        DataError: `state` has not all `choices`; or a number in it is missing or none.
    """
    for name, value in choices.items():
        if name not in state or state[name] != value:
            raise DataError(
                f"cannot continue the data where the run stopped: {name} was {state.get(name, '(unknown)')!r}, now it is "
                f"{value!r}. Give the same data, tokenizer and data options, or start a new run"
            )
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the position in the data is damaged ({error!r}), found {dict(state)}; start a new run") from error
