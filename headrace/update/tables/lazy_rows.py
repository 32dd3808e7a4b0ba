"""Rows of a table that are updated when they are read: exact lazy updates, with the bits of dense ones.

A step touches few rows of a table, but under AdamW the others move too: moments decay, and weights follow them. Each row keeps
the number of its last update. Before it is read, the updates that it missed are replayed by the rule itself, with a gradient of
zero, in order. A row that is never read again costs nothing.

Invariant: rows caught up to update n have the bits of a dense update of the whole table, n times. So the rule must update each
element alone, and without random rounding, which depends on an element's place (`refuse_other_rules`). Where states and
gradient are zero, it must leave an element as it is if that or its decay is zero.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.terms.errors import ConfigError
from headrace.terms.layout import PlaneSet
from headrace.update.rules.rule import Chunk, ElementRule, StepScalars, UpdateRule

_PIECE_BYTES = 1 << 18  # rows replayed together: with all planes they stay in a core's cache
_ELEMENT_BYTES = 12


def refuse_other_rules(rule: UpdateRule) -> ElementRule:
    """Return `rule` if missed updates of rows can be replayed under it.

    Raises:
        ConfigError: an element's update depends on others, or on its place; such a table must be updated whole.
    """
    if isinstance(rule, ElementRule) and rule.sums:
        return rule
    raise ConfigError(
        f"rows of a table: updates of {rule.figures.name} cannot be replayed row by row. An element's update depends on more "
        "than the element; use adamw with float32 moments, sgd or lion, a table with policy=dense, or gradient dense"
    )


class AppliedUpdates:
    """The learning rate of each update that was applied, from the first; a skipped step has none.

    With update counts this is all that a replay needs: no clip factor nor loss scale changes a gradient of zero.
    """

    def __init__(self, learning_rates: Iterable[float] = ()) -> None:
        self._learning_rates = list(learning_rates)

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """What a resumed run is given: 8 bytes for each update."""
        return tuple(self._learning_rates)

    @property
    def count(self) -> int:
        """How many updates were applied."""
        return len(self._learning_rates)

    def note(self, step: StepScalars) -> None:
        """Take note that `step` was applied.

        Raises:
            ConfigError: it is not the next one.
        """
        if step.update != self.count + 1:
            raise ConfigError(f"rows of a table: expected update {self.count + 1}, found {step.update}; note each update once")
        self._learning_rates.append(step.learning_rate)

    def step(self, update: int) -> StepScalars:
        """Return update number `update`, from 1, as it was for rows without a gradient."""
        return StepScalars(learning_rate=self._learning_rates[update - 1], update=update)


@dataclass(frozen=True, slots=True)
class StateRows:
    """Some rows of a table, changed in place: `weight` `(n, width)`, `states` alike, in the types of the rule's planes.

    `seen`, int64 `(n,)`, has the number of each row's last update; 0 is a row that was never updated.
    """

    weight: NDArray[Any]
    states: tuple[NDArray[Any], ...]
    seen: NDArray[np.int64]


class LazyRows:
    """The updates of a table's rows under one rule, one weight decay and one factor of the learning rate.

    If it does not `replay`, rows miss the updates of steps that do not touch them: neither weight nor states change there, as
    in torch's SparseAdam. That is another rule, and cheaper.

    Raises:
        ConfigError: the rule cannot be replayed by rows.
    """

    def __init__(
        self, rule: UpdateRule, weight_decay: float = 0.0, learning_rate_scale: float = 1.0, *, replay: bool = True
    ) -> None:
        self._rule, self._replays = refuse_other_rules(rule), replay
        self._group = weight_decay, learning_rate_scale

    @property
    def planes(self) -> PlaneSet:
        """The planes that the rule reads and writes."""
        return self._rule.planes

    def catch_up(self, rows: StateRows, applied: AppliedUpdates) -> None:
        """Replay the updates that `rows` missed, if it does so at all.

        Raises:
            ConfigError: a row has seen more updates than were applied.
        """
        if rows.seen.max(initial=0) > applied.count:
            raise ConfigError(
                f"rows of a table: a row has seen update {rows.seen.max()}, but {applied.count} were applied; "
                "read the rows as they were when that update was committed"
            )
        late = np.flatnonzero((rows.seen < applied.count) & ~self._still(rows) & self._replays)
        late = late[np.argsort(rows.seen[late], kind="stable")]
        at_once = max(1, _PIECE_BYTES // max(1, _ELEMENT_BYTES * rows.weight.shape[1]))
        for start in range(0, late.size, at_once):
            self._replay(rows, late[start : start + at_once], applied)
        rows.seen[:] = applied.count

    def update(self, rows: StateRows, gradient: NDArray[Any], step: StepScalars) -> None:
        """Update `rows` by their `gradient` `(n, width)`. Note the step in `AppliedUpdates` once for all rows.

        Raises:
            ConfigError: a row has not seen exactly the updates before `step`; nothing is changed then.
        """
        if (rows.seen != step.update - 1).any():
            raise ConfigError(
                f"rows of a table: update {step.update} asked for rows that have seen updates {rows.seen.min()} to "
                f"{rows.seen.max()}; catch up first"
            )
        self._rule.apply(_chunk(rows.weight, rows.states, gradient), step, *self._group)
        rows.seen[:] = step.update

    def _replay(self, rows: StateRows, late: NDArray[np.intp], applied: AppliedUpdates) -> None:
        """Replay what the rows `late` missed; those that missed most come first, so each update is of the first few."""
        weight, states = rows.weight[late], tuple(state[late] for state in rows.states)
        seen, gradient = rows.seen[late], np.zeros(weight.shape, np.float32)
        for update in range(int(seen[0]) + 1, applied.count + 1):
            some = int(np.searchsorted(seen, update))  # rows that have seen less than `update`
            chunk = _chunk(weight[:some], tuple(state[:some] for state in states), gradient[:some])
            self._rule.apply(chunk, applied.step(update), *self._group)
        rows.weight[late] = weight
        for state, new in zip(rows.states, states, strict=True):
            state[late] = new

    def _still(self, rows: StateRows) -> NDArray[np.bool_]:
        """Return which rows a gradient of zero leaves as they are: all bits of the rule's own states are zero, and there is no
        decay, or nothing to decay.
        """
        master = int(self._rule.planes.compute_dtype != "float32")  # the rest of it is no state
        moves = np.zeros(rows.seen.size, bool)
        for state in rows.states if self._group[0] else rows.states[master:]:
            moves |= state.view(np.uint8).any(axis=1)
        return ~(moves | rows.weight.view(np.uint8).any(axis=1)) if self._group[0] else ~moves


def _chunk(weight: NDArray[Any], states: tuple[NDArray[Any], ...], gradient: NDArray[Any]) -> Chunk[NDArray[Any]]:
    return Chunk(weight.reshape(-1), tuple(state.reshape(-1) for state in states), gradient.reshape(-1))
