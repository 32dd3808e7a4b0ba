"""What a node knows of its learners' work: the version of the shared weights, who learns from which rows, and what was merged.

Invariant: a lot of rows is open, merged or named as lost, whenever the node dies. The ledger is committed with the weights;
`merges.jsonl` follows from it.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from headrace.files.durable import write_whole
from headrace.terms.errors import ConfigError

# A push that began with an older version than this many before the newest is not merged.
MOST_STALENESS = 2
_LESS_PER_VERSION = 0.25
# Pushes are judged by the norms of the last so many that were accepted, once there are `LEAST_ACCEPTED`.
MOST_ACCEPTED, LEAST_ACCEPTED = 32, 8
# A learner gets no more rows once so many of its pushes were thrown out.
MOST_THROWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Lot:
    """Rows `[first, stop)` of the data's one order, which a learner takes for its own steps from version `base` on.

    `tokens` are those that are trained; `data` is the position of the stream before the first row.
    """

    number: int
    learner: int
    base: int
    first: int
    stop: int
    tokens: int
    data: Mapping[str, Any]

    def staleness(self, version: int) -> int:
        """Return how many versions the learner is behind."""
        return version - self.base

    def weight(self, version: int) -> float:
        """Return its weight in a merge."""
        return self.tokens / (1 + _LESS_PER_VERSION * self.staleness(version))

    def named(self, **more: Any) -> dict[str, Any]:
        """Return what the journal says of it."""
        return {"lot": self.number, "learner": self.learner, "base": self.base, "rows": [self.first, self.stop], **more}


@dataclass(frozen=True, slots=True, kw_only=True)
class LotLedger:
    """The state of a node between two commits: `lots` are open, `learners` are numbers by peer, `lost` is not yet told.

    `line` is the journal's newest line. `row` and `data` say where the next lot begins. `accepted` are the norms of the last
    pushes that were merged, by unit; `thrown` counts the pushes that were thrown out, by learner.
    """

    version: int = 0
    row: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)
    next_lot: int = 0
    lots: Mapping[int, Lot] = field(default_factory=dict)
    learners: Mapping[str, int] = field(default_factory=dict)
    lost: Sequence[Mapping[str, Any]] = ()
    line: Mapping[str, Any] | None = None
    accepted: Sequence[Sequence[float]] = ()
    thrown: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the ledger of which `to_json` made `values`."""
        return cls(**{**values, "lots": {int(each["number"]): Lot(**each) for each in values["lots"]}})

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        return {**plain, "lots": [asdict(lot) for lot in self.lots.values()]}

    def with_learner(self, peer: str) -> Self:
        """Return the ledger with this peer, who has a number."""
        return self if peer in self.learners else replace(self, learners={**self.learners, peer: len(self.learners) + 1})

    def with_lot(self, lot: Lot) -> Self:
        """Return the ledger with an open lot more, or again."""
        return replace(self, lots={**self.lots, lot.number: lot})

    def losing(self, lots: Sequence[Lot], reason: str, *, thrown: bool = False) -> Self:
        """Return the ledger without open lots, which the next line names; `thrown`: what was learned of them was thrown out."""
        kept = {number: lot for number, lot in self.lots.items() if lot not in lots}
        counts = Counter(self.thrown)
        counts.update(str(lot.learner) for lot in lots if thrown)
        return replace(self, lots=kept, thrown=dict(counts), lost=(*self.lost, *(lot.named(reason=reason) for lot in lots)))

    def merged(self, entries: Sequence[Mapping[str, Any]], **more: Any) -> Self:
        """Return the ledger of the next version, in which the lots of `entries` are merged."""
        gone = {each["lot"] for each in entries}
        line = {"version": self.version + 1, "lots": list(entries), "lost": list(self.lost), **more}
        kept = {number: lot for number, lot in self.lots.items() if number not in gone}
        accepted = (*self.accepted, *(each["norms"] for each in entries if "norms" in each))[-MOST_ACCEPTED:]
        return replace(self, version=self.version + 1, lots=kept, lost=(), line=line, accepted=accepted)


_PLAIN = ("version", "row", "data", "next_lot", "learners", "lost", "line", "accepted", "thrown")


class Journal:
    """`merges.jsonl`: a line for each merge, and one for what is lost at the end. `newest` is the ledger's newest line."""

    def __init__(self, path: Path, newest: Mapping[str, Any] | None) -> None:
        self._path = path
        version = newest["version"] if newest else 0
        kept = [line for line in read_journal(path) if line["version"] < version] if path.exists() else []
        self.lines = [*kept, *([newest] if newest else [])]
        write_whole(path, "".join(json.dumps(line) + "\n" for line in self.lines))

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line, and make it durable."""
        self.lines.append(line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a journal; half a line at its end, which a kill left, is none.

    Raises:
        ConfigError: it cannot be read, or is no journal.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"replay: {path} cannot be read ({error}); give the merges.jsonl of a run") from error
    try:
        found = list(_whole_lines(lines))
        if any(not {"version", "lots", "lost"} <= each.keys() for each in found):
            raise ValueError("a line is no merge")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"replay: {path} is no journal of merges ({error}); give the merges.jsonl of a run") from error
    return found


def _whole_lines(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError:
                if number < len(lines) - 1:
                    raise
