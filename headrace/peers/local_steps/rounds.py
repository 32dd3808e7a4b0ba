"""When a merge is due, and which rows a learner takes next: by quorum and grace, or as the journal of another run says."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from headrace.peers.local_steps.ledger import Lot, LotLedger
from headrace.terms.errors import ConfigError


class Rounds(Protocol):
    """Decides, and keeps nothing that a restart would miss."""

    def next_rows(self, learner: int, ledger: LotLedger) -> tuple[int, int] | None:
        """Return the number and the first row of a learner's next lot; None: it has to wait."""

    def due(self, ledger: LotLedger, pushed: Sequence[Lot], *, others: bool) -> Sequence[Lot]:
        """Return the lots to merge now, in their order, () for none. `others`: some learners still compute."""

    def lost(self, ledger: LotLedger) -> Mapping[int, str]:
        """Return the open lots that the next merge names as lost, and why."""

    def waits_for(self, ledger: LotLedger, pushed: Sequence[Lot], present: Collection[int]) -> str:
        """Return whom the next merge waits for, where the learners that are `present` have nothing to do; "": nobody."""

    @property
    def judges(self) -> bool:
        """Whether pushes are judged by their norms; else it was decided before which are thrown out."""


class ByQuorum:
    """A merge waits until `quorum` lots are there, and then `grace_seconds` for the other learners."""

    def __init__(self, quorum: int, grace_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._quorum, self._grace_seconds, self._clock = quorum, grace_seconds, clock
        self._since: float | None = None

    def next_rows(self, learner: int, ledger: LotLedger) -> tuple[int, int] | None:
        """Return the next rows of the data."""
        return ledger.next_lot, ledger.row

    def due(self, ledger: LotLedger, pushed: Sequence[Lot], *, others: bool) -> Sequence[Lot]:
        """Return all lots once there are enough and nobody else is waited for."""
        if len(pushed) < self._quorum:
            self._since = None
            return ()
        if self._since is None:
            self._since = self._clock()
        if others and self._clock() - self._since < self._grace_seconds:
            return ()
        self._since = None
        return sorted(pushed, key=lambda lot: lot.number)

    def lost(self, ledger: LotLedger) -> Mapping[int, str]:
        """Return none: they are refused when they come."""
        return {}

    def waits_for(self, ledger: LotLedger, pushed: Sequence[Lot], present: Collection[int]) -> str:
        """Return how many learners the quorum needs."""
        missing = self._quorum - len(pushed)
        if missing <= 0:
            return ""
        many = "one more learner" if missing == 1 else f"{missing} more learners"
        there = f"{len(pushed)} of the quorum's {self._quorum} have sent what they learned"
        return f"merge {ledger.version + 1} waits for {many}: {there}"

    @property
    def judges(self) -> bool:
        """Whether pushes are judged by their norms."""
        return True


class Replayed:
    """Merges are those of a journal's `lines`: a learner takes the lots of the one with its number, from the same versions.

    Raises:
        ConfigError: the journal has no merge.
    """

    def __init__(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self._merges = {int(line["version"]): line for line in lines if line["lots"]}
        if not self._merges:
            raise ConfigError("replay: the journal has no merge; give the merges.jsonl of a run that had one")
        entries = [each for line in lines for each in _told(line)]
        self._lots = sorted(entries, key=lambda each: int(each["lot"]))

    @property
    def merges(self) -> int:
        """How many merges there are."""
        return max(self._merges)

    def next_rows(self, learner: int, ledger: LotLedger) -> tuple[int, int] | None:
        """Return the learner's next lot in the journal, once the shared weights are those that it began with."""
        for each in self._lots:
            if each["learner"] == learner and not self._is_dealt(each, ledger):
                return (each["lot"], each["rows"][0]) if each["base"] == ledger.version else None
        return None

    def due(self, ledger: LotLedger, pushed: Sequence[Lot], *, others: bool) -> Sequence[Lot]:
        """Return the lots of the next merge once all are there, and all that begin with this version are dealt."""
        line = self._merges.get(ledger.version + 1)
        begun = all(self._is_dealt(each, ledger) for each in self._lots if each["base"] <= ledger.version)
        there = {lot.number: lot for lot in pushed}
        wanted = [each["lot"] for each in line["lots"]] if line else []
        return [there[number] for number in wanted] if begun and all(number in there for number in wanted) else ()

    def lost(self, ledger: LotLedger) -> Mapping[int, str]:
        """Return the lots that were lost then."""
        found = self._merges.get(ledger.version + 1, {}).get("lost", ())
        return {each["lot"]: each["reason"] for each in found if each["lot"] in ledger.lots}

    def waits_for(self, ledger: LotLedger, pushed: Sequence[Lot], present: Collection[int]) -> str:
        """Return whose lots the journal has before the next merge."""
        line, there = self._merges.get(ledger.version + 1), {lot.number for lot in pushed}
        wanted = {each["lot"] for each in line["lots"]} if line else set()
        open_ones = [
            each
            for each in self._lots
            if each["base"] <= ledger.version
            and each["lot"] not in there
            and (each["lot"] in wanted or not self._is_dealt(each, ledger))
        ]
        if not open_ones:
            return ""
        names = ", ".join(f"learner {each['learner']}, who took lot {each['lot']}" for each in open_ones)
        here = ", ".join(map(str, sorted(present))) or "none"
        return f"replay: merge {ledger.version + 1} waits for {names}; learners that are here: {here}"

    @property
    def judges(self) -> bool:
        """The journal says which pushes were thrown out."""
        return False

    def _is_dealt(self, entry: Mapping[str, Any], ledger: LotLedger) -> bool:
        gone = (each for version, line in self._merges.items() if version <= ledger.version for each in _told(line))
        told = (*gone, *ledger.lost)
        return entry["lot"] in ledger.lots or any(each["lot"] == entry["lot"] for each in told)


def _told(line: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    return (*line["lots"], *line["lost"])
