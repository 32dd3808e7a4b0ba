"""Which columns are read, and under which names: what the data calls `conversation` may be read as `messages`.

Invariant: only names change. A column of ours that another one stands for is not read under its own name.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from headrace.data.chat.forms import READ
from headrace.data.values.values import Row
from headrace.terms.errors import DataError, shortened


@dataclass(frozen=True, slots=True)
class Columns:
    """`theirs` has the data's names by ours. `every`: also columns that no form of data reads are values, for functions of the
    user's. `most_bytes`: only the beginning of a text that is longer may be read.
    """

    theirs: Mapping[str, str] = field(default_factory=dict)
    every: bool = False
    most_bytes: int = 4 << 20

    def ours(self, names: Iterable[str]) -> dict[str, str]:
        """Return our name for each of the data's `names`, without those that others stand for."""
        of_theirs = {theirs: ours for ours, theirs in self.theirs.items()}
        return {name: of_theirs.get(name, name) for name in names if name in of_theirs or name not in self.theirs}

    def reads(self, ours: str) -> bool:
        """Return whether anybody looks at the column that we call `ours`."""
        return self.every or ours in READ

    def wanted(self, names: Iterable[str]) -> list[str]:
        """Return those of the data's `names` that are read."""
        return [theirs for theirs, ours in self.ours(names).items() if self.reads(ours)]

    def refuse_missing(self, place: str, names: Iterable[str]) -> None:
        """Refuse columns of which one is not among the data's `names`.

        Raises:
            DataError: one is missing.
        """
        found = list(names)
        missing = next((theirs for theirs in self.theirs.values() if theirs not in found), None)
        if missing is not None:
            has = shortened(", ".join(map(repr, found))) or "(none)"
            raise DataError(f"{place}: columns names {missing!r}, the data has {has}; correct columns")

    def renamed(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield `rows` of texts under our names. The first one must have all that are named.

        Raises:
            DataError: it has not.
        """
        for index, row in enumerate(rows):
            if index == 0:
                self.refuse_missing(row.place, row.values)
            ours = self.ours(row.values)
            yield replace(row, values={ours[name]: value for name, value in row.values.items() if name in ours})
