"""Frozen weights that a run reads from the model's own files, and does not copy into its state.

That is decided unit by unit. A file must have a unit's tensors as compute reads them, and the model must lie on the one drive
of the state. If the state goes to another drive or to several, they get a copy. Invariant: exactly the bytes of the files that
the run began with are read. A run whose files have changed since is not resumed.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.files import Bytes, ExtentReader, Ticket
from headrace.files.extents import part_of
from headrace.model import Chain, WeightMap
from headrace.model.directory.in_place import StoredUnit, paths_of, stored_units
from headrace.terms.errors import RunDirectoryError
from headrace.terms.events import Sink
from headrace.terms.layout import UNIT_ALIGNMENT
from headrace.terms.sizes import round_up

# In a state's identity, size and time of change of each file: of lent units, of experts that are parts, of rows of
# an embedding, and of tables in blocks.
IDENTITY, PARTED, ROWS, TABLES = "lent", "experts", "rows", "tables"


@dataclass(frozen=True)
class LentBase:
    """The units that are read in the model's files, each laid out as it lies there."""

    units: Mapping[int, StoredUnit]

    @classmethod
    def of(cls, chain: Chain, weights: WeightMap, *, on_cpu: bool) -> "LentBase":
        """Return those units of `chain` that lie in the files as compute reads them; on_cpu: the CPU computes."""
        found = {}
        for number, unit in enumerate(stored_units(chain.layouts, weights, chain.dtype, on_cpu=on_cpu)):
            if unit.extents and not unit.is_made:
                elements = round_up(unit.layout.num_elements, UNIT_ALIGNMENT)
                found[number] = replace(unit, layout=replace(unit.layout, num_elements=elements))
        return cls(found)

    @property
    def identity(self) -> dict[str, Any]:
        """What a run's state says of the files."""
        return {IDENTITY: marks_of(paths_of(tuple(self.units.values())))} if self.units else {}

    def lay_out(self, chain: Chain) -> None:
        """Have the parameters of these units where they are in the files. Nothing is bound."""
        layouts = enumerate(chain.layouts)
        chain.lay_out([self.units[unit].layout if unit in self.units else layout for unit, layout in layouts])

    def open(self, sink: Sink, others: Sequence[Path] = ()) -> "LentReader":
        """Open the files, and `others` that are read by the same reader."""
        return LentReader(self.units, sink, others)


class LentReader:
    """Reads units in the model's files: a `store.lent.LentFiles`."""

    def __init__(self, units: Mapping[int, StoredUnit], sink: Sink, others: Sequence[Path] = ()) -> None:
        self._units = units
        self.reader = ExtentReader(tuple(dict.fromkeys((*paths_of(tuple(units.values())), *others))), sink=sink)

    @property
    def bytes_read(self) -> int:
        """See `store.lent.LentFiles`."""
        return self.reader.bytes_read

    def read(self, unit: int, into: Bytes) -> Ticket:
        """See `store.lent.LentFiles`."""
        return self.reader.read(self._units[unit].extents, into)

    def read_span(self, unit: int, start: int, into: Bytes) -> Ticket:
        """See `store.lent.LentFiles`."""
        parts = (part_of(extent, start, start + into.size) for extent in self._units[unit].extents)
        return self.reader.read([part for part in parts if part is not None], into)

    def close(self) -> None:
        """See `store.lent.LentFiles`."""
        self.reader.close()


def lie_together(files: Sequence[Path], directories: Sequence[Path]) -> bool:
    """Return whether a model's files lie on the file system of the one directory that a state goes to."""
    return len(directories) == 1 and {path.stat().st_dev for path in files} == {_drive_of(directories[0])}


def check_lent(identity: Mapping[str, Any]) -> None:
    """Refuse to go on where the files of a run have changed since it began.

    Raises:
        RunDirectoryError: one is gone, or was written since.
    """
    marks = {name: mark for kind in (IDENTITY, PARTED, ROWS, TABLES) for name, mark in identity.get(kind, {}).items()}
    for name, mark in marks.items():
        path = Path(name)
        if not path.exists() or _mark(path) != list(mark):
            what = "changed since" if path.exists() else "is gone since"
            raise RunDirectoryError(
                f"{path}: {what} the run began, which reads its frozen weights there; restore the file with its time (cp -p)"
            )


def marks_of(paths: Sequence[Path]) -> dict[str, list[int]]:
    """Return the marks of files, by name."""
    return {str(path): _mark(path) for path in paths}


def _mark(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _drive_of(directory: Path) -> int:
    """Return the file system that `directory` is on, or will be."""
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    return os.stat(there).st_dev
