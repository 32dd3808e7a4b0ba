"""The rows of a run's tables: gathered as steps need them, updated by the gradients of those that were, written with commits.

A step gathers rows before it computes with them, and adds their gradients in the order of micro-batches. Once the norm is known
it is concluded: the touched rows are updated in memory, all others wait until they are read (`lazy_rows`). A commit writes what
was updated since the last one, and its record holds what `seal` returns.

Invariants: a row reads as after a dense update of its whole table, bit for bit. What a commit names is durable before its
record; what no record names does not count (`store.row_store`).
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.files import BlockFile
from headrace.store.row_store import History, RowLayout, RowStore
from headrace.terms.layout import PlaneSet, UnitLayout, part
from headrace.update.rules.norm import PlacedSquares
from headrace.update.rules.rule import StepScalars
from headrace.update.tables.lazy_rows import AppliedUpdates, LazyRows, StateRows

ROWS = "rows"
"""The key of a commit record under which it holds what `TableRows.seal` returned."""

Ids = NDArray[np.int64]
FirstRows = Callable[[Ids], NDArray[np.float32]]
"""Reads the first weights (n, width) of rows, which ascend."""

_PIECE_BYTES = 8 << 20  # rows of an export that are read together


@dataclass(frozen=True, slots=True)
class RowFamily:
    """A table as its wire knows it: `rows` of `width` numbers, updated with this factor of the learning rate and this decay.

    Rows that it does not `replay` stay as they are until a step touches them. Where it is `stored`, its first weights are those
    of the model's files; if not, zeros. Gradients have `gradient_dtype` once a step has summed them in float32; None: that of
    the run. Where other parameters of its unit are trained beside it, `whole` is the layout of both, and it is called `name`.
    """

    rows: int
    width: int
    learning_rate_scale: float
    weight_decay: float
    replay: bool = True
    stored: bool = False
    gradient_dtype: str | None = "float32"
    whole: UnitLayout | None = None
    name: str = ""


def row_layout(num_rows: int, width: int, planes: PlaneSet) -> RowLayout:
    """Return how rows of `width` numbers lie on a drive: the weight and all states of a row together."""
    return RowLayout(num_rows, sum(plane.num_bytes(width) for plane in (planes.weight, *planes.states)))


@dataclass(slots=True)
class _Held:
    """Rows in memory, by ascending ids, and the sums of the gradients of those that have some."""

    ids: Ids
    rows: StateRows
    sums: NDArray[np.float32]
    summed: NDArray[np.bool_]

    @classmethod
    def of(cls, ids: Ids, rows: StateRows) -> "_Held":
        return cls(ids, rows, np.zeros(rows.weight.shape, np.float32), np.zeros(ids.size, bool))

    def joined(self, other: "_Held") -> "_Held":
        """Return these and other rows, none of which is among these."""
        ids = np.concatenate([self.ids, other.ids])
        order = np.argsort(ids, kind="stable")

        def both(own: NDArray[Any], more: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([own, more])[order]

        states = tuple(both(*pair) for pair in zip(self.rows.states, other.rows.states, strict=True))
        rows = StateRows(both(self.rows.weight, other.rows.weight), states, both(self.rows.seen, other.rows.seen))
        return _Held(ids[order], rows, both(self.sums, other.sums), both(self.summed, other.summed))


@dataclass(slots=True)
class OpenTable:
    """One table: where its rows lie, and how they are updated. `updated` are rows that no commit has written yet, by the number
    of their update. `first` reads rows that no update has changed; without it they are zeros. Where it is the parameter `name`
    of a unit that has others, `whole` is the layout of all.
    """

    file: BlockFile
    store: RowStore
    lazy: LazyRows
    width: int
    planes: PlaneSet
    first: FirstRows | None = None
    gradient_dtype: torch.dtype = torch.float32
    whole: UnitLayout | None = None
    name: str = ""
    held: _Held = field(init=False)
    updated: dict[int, tuple[Ids, StateRows]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.forget()

    @classmethod
    def on(cls, file: BlockFile, lazy: LazyRows, num_rows: int, width: int, history: History = (), **more: Any) -> "OpenTable":
        """Return the table in `file`; a new file holds none of its rows."""
        planes = lazy.planes
        return cls(file, RowStore(file, row_layout(num_rows, width, planes), history), lazy, width, planes, **more)

    @property
    def start(self) -> int:
        """Where its first element lies in its unit."""
        return next(each.offset for each in self.whole.parameters if each.name == self.name) if self.whole else 0

    def forget(self) -> None:
        """Hold no rows."""
        self.held = _Held.of(np.empty(0, np.int64), self._rows(np.empty((0, self.store.layout.row_bytes), np.uint8)))

    def read(self, ids: Ids, applied: AppliedUpdates) -> StateRows:
        """Return rows as they are after the updates `applied`."""
        pages = self.store.read(ids)
        at = pages.positions(ids)
        rows = self._rows(pages.rows[at], pages.seen[at])
        if self.first is not None and (new := np.flatnonzero(rows.seen == 0)).size:
            rows.weight[new] = self.first(ids[new])
        for known, newer in self.updated.values():  # oldest first
            here, there = np.intersect1d(ids, known, assume_unique=True, return_indices=True)[1:]
            for plane, new in zip(_planes(rows), _planes(newer), strict=True):
                plane[here] = new[there]
        self.lazy.catch_up(rows, applied)
        return rows

    def write(self, count: int) -> None:
        """Write the rows of updates up to number `count`."""
        for update in [number for number in self.updated if number <= count]:
            ids, rows = self.updated[update]
            pages = self.store.read(ids)
            at = pages.positions(ids)
            pages.rows[at] = np.concatenate([plane.view(np.uint8) for plane in (rows.weight, *rows.states)], axis=1)
            pages.seen[at] = rows.seen
            self.store.write(pages, update)
            del self.updated[update]

    @property
    def gradient(self) -> NDArray[np.float32]:
        """The gradients (n, width) of rows that have some, by ascending ids."""
        sums: NDArray[np.float32] = self.held.sums[self.held.summed]
        if self.gradient_dtype == torch.float32:
            return sums
        rounded: NDArray[np.float32] = torch.from_numpy(sums).to(self.gradient_dtype).float().numpy()
        return rounded

    def add_squares(self, squares: PlacedSquares) -> None:
        """Add the squares of the gradient; rows without one are zeros."""
        squares.add_rows(self.start, self.held.ids[self.held.summed], self.gradient)

    def _rows(self, content: NDArray[np.uint8], seen: Ids | None = None) -> StateRows:
        start, planes = 0, []
        for plane in (self.planes.weight, *self.planes.states):
            stop = start + plane.num_bytes(self.width)
            planes.append(np.ascontiguousarray(content[:, start:stop]).view(plane.dtype))
            start = stop
        return StateRows(planes[0], tuple(planes[1:]), np.zeros(len(content), np.int64) if seen is None else seen)


class TableRows:
    """The rows of `tables`, by unit, after the updates `applied`. Of a table `most_held` rows are held, if no step needs more.

    Steps call it from the thread that computes and the one that decides; commits may come from another.
    """

    def __init__(self, tables: Mapping[int, OpenTable], applied: AppliedUpdates, most_held: int = 1 << 62) -> None:
        self._tables, self.applied, self.most_held = dict(tables), applied, most_held
        self._lock = threading.Lock()

    @property
    def bytes_read(self) -> int:
        """Bytes of all pages that were read."""
        return sum(table.store.bytes_read for table in self._tables.values())

    @property
    def bytes_written(self) -> int:
        """Bytes of all pages that were written."""
        return sum(table.store.bytes_written for table in self._tables.values())

    def gather(self, unit: int, ids: Ids) -> NDArray[np.float32]:
        """Return the newest weights (n, width) of rows `ids`, which ascend.

        Raises:
            StorageError: a page is damaged, or the drive failed.
        """
        with self._lock:
            table = self._tables[unit]
            missing = np.setdiff1d(ids, table.held.ids, assume_unique=True)
            if missing.size:
                if table.held.ids.size + missing.size > self.most_held and not table.held.summed.any():
                    table.forget()  # what was read for an evaluation
                    missing = ids
                table.held = table.held.joined(_Held.of(missing, table.read(missing, self.applied)))
            weight: NDArray[np.float32] = table.held.rows.weight[np.searchsorted(table.held.ids, ids)]
            return weight

    def add(self, unit: int, ids: Ids, gradient: NDArray[np.float32]) -> None:
        """Add gradients (n, width) of rows `ids`, which this step has gathered."""
        with self._lock:
            held = self._tables[unit].held
            at = np.searchsorted(held.ids, ids)
            held.sums[at] += gradient
            held.summed[at] = True

    def square_sums(self) -> list[float]:
        """Return the sums of squares of the gradients, by table that is all of its unit."""
        with self._lock:
            alone = [table for table in self._tables.values() if table.whole is None]
            return [_square_sum(table, ()) for table in alone]

    def square_sum_with(self, unit: int, layout: UnitLayout, gradient: NDArray[np.generic]) -> float | None:
        """Return the sum of squares of a unit's `gradient`, which `layout` lays out, and of the table among its parameters.

        It has the bits of the whole unit's. None: there is no such table.
        """
        table = self._tables.get(unit)
        if table is None or table.whole is None:
            return None
        own = {spec.name: spec for spec in layout.parameters}
        others = [(spec.offset, part(gradient, own[spec.name])) for spec in table.whole.parameters if spec.name in own]
        with self._lock:
            return _square_sum(table, others)

    def conclude(self, scalars_of: Callable[[int], StepScalars] | None) -> None:
        """Update the rows that have gradients by what their unit's update is given; None for a step that is skipped.

        Afterwards no gradient is left.
        """
        with self._lock:
            step = None
            for unit, table in self._tables.items():
                held = table.held
                if scalars_of is not None:
                    step = scalars_of(unit)
                    touched = np.flatnonzero(held.summed)
                    states = tuple(state[touched] for state in held.rows.states)
                    rows = StateRows(held.rows.weight[touched], states, held.rows.seen[touched])
                    table.lazy.update(rows, table.gradient, step)
                    table.updated[step.update] = (held.ids[touched], rows)
                table.forget()
            if step is not None:
                self.applied.note(step)

    def seal(self, count: int) -> dict[str, Any]:
        """Make the rows durable as they are after update number `count`; return what the commit record must hold.

        Raises:
            StorageError: the drive failed.
        """
        with self._lock:
            histories = {}
            for unit, table in self._tables.items():
                table.write(count)
                histories[str(unit)] = table.store.seal()
            return {"learning_rates": self.applied.learning_rates[:count], "histories": histories}

    def committed(self) -> None:
        """Take note that the record with what `seal` returned is durable."""
        with self._lock:
            for table in self._tables.values():
                table.store.committed()

    def close(self) -> None:
        """Close the files."""
        for table in self._tables.values():
            table.file.close()

    def weights(self, unit: int, begin: int = 0, end: int | None = None) -> Iterator[NDArray[np.float32]]:
        """Yield the newest weights of a table's rows from `begin` up to `end`, some rows at a time; None: up to the last."""
        layout = self._tables[unit].store.layout
        at_once, end = max(1, _PIECE_BYTES // layout.row_bytes), layout.num_rows if end is None else end
        for start in range(begin, end, at_once):
            ids = np.arange(start, min(start + at_once, end))
            with self._lock:
                found: NDArray[np.float32] = self._tables[unit].read(ids, self.applied).weight
            yield found


def _square_sum(table: OpenTable, others: Sequence[tuple[int, NDArray[np.generic]]]) -> float:
    """Return the sum of squares of a table's gradient and of those of `others`, each with its place in the unit."""
    squares, before = PlacedSquares(), sum(start < table.start for start, _ in others)
    for start, flat in others[:before]:
        squares.add(start, flat)
    table.add_squares(squares)
    for start, flat in others[before:]:
        squares.add(start, flat)
    return squares.total()


def _planes(rows: StateRows) -> tuple[NDArray[Any], ...]:
    return rows.weight, *rows.states, rows.seen
