"""The broker of a node (FusionAI's word): deals rows to learners, takes what they learned, and merges it.

Threads of learners call it; the run's own thread merges. Files that travel are whole and never change: no learner waits for a
merge in order to be sent to, and none is read while it is written.
Invariant: what a learner was told is committed before it is told.
"""

import math
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from headrace.data import Batch, BatchStream
from headrace.files.scratch import remove_tree
from headrace.peers.local_steps.ledger import LEAST_ACCEPTED, MOST_STALENESS, MOST_THROWN, Journal, Lot, LotLedger
from headrace.peers.local_steps.number_file import NumberFile
from headrace.peers.local_steps.outer import Change, Merge, OuterState
from headrace.peers.local_steps.rounds import Rounds
from headrace.update.sites.travel import TRAVELS, Travel

# Changes that are kept, each from one version to the next: who is further behind is sent all weights.
_KEPT_CHANGES = 2
# A push is not merged if a unit's norm is above so many times the median of the merge.
_MOST_OF_MEDIAN = 10.0
_LOOK_SECONDS = 0.1
_NOT_FINITE = "its numbers are not finite"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerWork:
    """What a learner is given: to begin with `lot.base`, whose numbers it has after `files`, and to take these steps.

    `whole`: the one file has all numbers of that version; else there is one change after the other.
    """

    lot: Lot
    files: Sequence[NumberFile]
    whole: bool
    batches: Sequence[Batch]
    first_step: int


class Broker:
    """Deals, takes and merges for the run of `state`, `steps` own steps of a learner in each merge and `total_steps` in all.

    `rounds` decide when, `travel` how numbers travel. Files lie in `folder`.
    """

    def __init__(
        self,
        state: OuterState,
        stream: BatchStream,
        rounds: Rounds,
        *,
        steps: int,
        total_steps: int,
        folder: Path,
        travel: Travel = TRAVELS["bfloat16"],
    ) -> None:
        self._state, self._stream, self._rounds, self._folder, self._travel = state, stream, rounds, folder, travel
        self._steps, self.total_steps = steps, total_steps
        found = state.record
        self.ledger = LotLedger.from_json(found) if found else LotLedger(data=stream.state())
        self.journal = Journal(folder.parent / "merges.jsonl", self.ledger.line)
        self.changed = threading.Condition(threading.RLock())
        self.is_over = False
        self.news: list[str] = []  # what a person should know
        self._why_thrown: dict[int, str] = {}
        self._present: Counter[int] = Counter()  # learners by number
        self._in_use: Counter[Path] = Counter()
        self._pushed = {number for number in self.ledger.lots if self._push(number).exists}
        for partial in folder.glob("*.new"):
            partial.unlink()
        # The node may have died before it said so.
        not_finite = [self.ledger.lots[number] for number in self._pushed if not self._is_finite(number)]
        self._lose(not_finite, _NOT_FINITE, thrown=True)
        self._tidy()

    @property
    def steps_done(self) -> int:
        """A learner's own steps up to the newest version."""
        return min(self.ledger.version * self._steps, self.total_steps)

    @property
    def is_done(self) -> bool:
        """Whether the last merge is taken."""
        return self.steps_done >= self.total_steps

    @contextmanager
    def learner(self, peer: str) -> Iterator[int]:
        """Return a peer's number; it is present in this context."""
        with self.changed:
            if peer not in self.ledger.learners:
                self._commit(self.ledger.with_learner(peer))
            number = self.ledger.learners[peer]
            self._present[number] += 1
        try:
            yield number
        finally:
            with self.changed:
                self._present[number] -= 1
                self.changed.notify_all()

    @contextmanager
    def work(self, learner: int, held: int | None, lot: int | None, gone: Callable[[], bool]) -> Iterator[LearnerWork | None]:
        """Give a learner rows, once there are some for it: those of `lot` again if it is at work on them. It has the numbers of
        version `held`. None if the run is over, or the learner is `gone`. Files stay as long as the context.
        """
        found: LearnerWork | None = None
        with self.changed:
            while found is None and not self.is_over and not gone() and self.why_no_more(learner) is None:
                found = self._work(learner, held, lot)
                if found is None:
                    self.changed.wait(_LOOK_SECONDS)
            self._in_use.update(each.path for each in (found.files if found else ()))
        try:
            yield found
        finally:
            with self.changed:
                self._in_use.subtract(each.path for each in (found.files if found else ()))

    def _work(self, learner: int, held: int | None, number: int | None) -> LearnerWork | None:
        own = [lot for lot in self.ledger.lots.values() if lot.learner == learner]
        at_work = next((lot for lot in own if lot.number not in self._pushed), None)
        if at_work is not None and at_work.number == number and at_work.base == held:
            return self._given(at_work, held)
        if self.is_done or self.why_no_more(learner) is not None:
            return None
        if at_work is not None:  # it has not begun, and has lost nothing
            again = replace(at_work, base=self.ledger.version)
            self._commit(self.ledger.with_lot(again))
            return self._given(again, held)
        if any(lot.base == self.ledger.version for lot in own):
            return None  # its push waits for the next merge
        rows = self._rounds.next_rows(learner, self.ledger)
        return None if rows is None else self._given(self._dealt(learner, *rows), held)

    def _dealt(self, learner: int, number: int, first: int) -> Lot:
        """Deal the rows from `first` on, and commit that."""
        steps = min(self._steps, self.total_steps - self.steps_done)
        self._go_to(first)
        data = self._stream.state()
        tokens = sum(self._stream.next_batch().num_trained_tokens for _ in range(steps))
        lot = Lot(
            number=number,
            learner=learner,
            base=self.ledger.version,
            first=first,
            stop=first + steps * self._rows_per_step,
            tokens=tokens,
            data=data,
        )
        last = replace(self.ledger, row=lot.stop, data=self._stream.state(), next_lot=number + 1)
        self._commit((last if number >= self.ledger.next_lot else self.ledger).with_lot(lot))
        return lot

    def _go_to(self, row: int) -> None:
        """Let the stream stand before a row."""
        if row == self.ledger.row:
            self._stream.restore(self.ledger.data)
            return
        self._stream = self._stream.from_the_start()  # another run's order of lots is taken again
        for _ in range(row // self._rows_per_step):
            self._stream.next_batch()

    @property
    def _rows_per_step(self) -> int:
        return self._stream.spec.rows_per_step

    def _given(self, lot: Lot, held: int | None) -> LearnerWork:
        self._stream.restore(lot.data)
        batches = [self._stream.next_batch() for _ in range((lot.stop - lot.first) // self._rows_per_step)]
        changes = [self._change(version) for version in range((lot.base if held is None else held) + 1, lot.base + 1)]
        whole = held is None or held > lot.base or not all(each.exists for each in changes)
        files = [self._whole(lot.base)] if whole else changes
        return LearnerWork(lot=lot, files=files, whole=whole, batches=batches, first_step=lot.base * self._steps)

    def why_no_more(self, learner: int) -> str | None:
        """Return why a learner gets no more rows; None if it may get some."""
        if self.ledger.thrown.get(str(learner), 0) < MOST_THROWN:
            return None
        why = self._why_thrown.get(learner, "of its numbers")
        return f"{MOST_THROWN} pushes of learner {learner} were thrown out, the last because {why}"

    def throw_out(self, number: int, reason: str) -> None:
        """Name the lot of a push that came as nothing that can be merged."""
        with self.changed:
            if (lot := self.ledger.lots.get(number)) is not None:
                self._lose([lot], reason, thrown=True)

    def waits_for(self) -> str:
        """Return whom the next merge waits for, if nobody who is here computes; "" for nobody."""
        with self.changed:
            present = {learner for learner, count in self._present.items() if count > 0}
            computing = (lot.learner in present and number not in self._pushed for number, lot in self.ledger.lots.items())
            if self.is_done or any(computing):
                return ""
            return self._rounds.waits_for(self.ledger, self._there(), present)

    def why_not(self, learner: int, number: int) -> str | None:
        """Return why a push is not wanted; None if it is."""
        with self.changed:
            lot = self.ledger.lots.get(number)
            if lot is None or lot.learner != learner or number in self._pushed:
                return "it is there, or was named as lost"
            if lot.staleness(self.ledger.version) > MOST_STALENESS:
                reason = f"stale: it began with version {lot.base}, the newest is {self.ledger.version}"
                self._lose([lot], reason)
                return reason
            return None

    def take(self, number: int, units: Iterator[NDArray[Any]], figures: Mapping[str, Any]) -> str | None:
        """Take a push, unit by unit, with a learner's `figures` of its steps. Return why it is not merged, None if it is."""
        norms, notes = list[float](), dict(figures)

        def checked() -> Iterator[NDArray[Any]]:
            for unit, count in zip(units, self._state.masters.counts, strict=True):
                norms.append(float(self._travel.decode(unit, count).double().norm()))
                yield unit
            notes["norms"] = norms

        self._push(number).write(checked(), notes)
        with self.changed:
            if number not in self.ledger.lots:  # meanwhile
                self._push(number).remove()
                return "it was named as lost"
            self._pushed.add(number)
            if not self._is_finite(number):
                self._lose([self.ledger.lots[number]], _NOT_FINITE, thrown=True)
                return _NOT_FINITE
            if (reason := self._rounds.lost(self.ledger).get(number)) is not None:  # a replay: its learner took other rows then
                self._lose([self.ledger.lots[number]], reason)
                return reason
            self.changed.notify_all()
            return None

    def _is_finite(self, number: int) -> bool:
        notes = self._push(number).notes
        return all(map(math.isfinite, [*notes["norms"], notes["loss"]]))

    def merge_if_due(self) -> dict[str, Any] | None:
        """Merge if it is time to, and return the journal's line."""
        with self.changed:
            due = self._rounds.due(self.ledger, self._there(), others=self._others)
            if not due:
                return None
            for number, reason in self._rounds.lost(self.ledger).items():
                self._lose([self.ledger.lots[number]], reason)
            outliers = self._outliers(due) if self._rounds.judges else []
            if outliers:
                self._lose(outliers, f"a norm is above {_MOST_OF_MEDIAN:g} times the median {self._judged_by}", thrown=True)
            lots = [lot for lot in due if lot not in outliers]
            return self._merge(lots) if lots else None

    @property
    def _others(self) -> bool:
        """Whether a learner that is present still computes."""
        pushed = {self.ledger.lots[number].learner for number in self._pushed}
        return any(count > 0 and learner not in pushed for learner, count in self._present.items())

    def _there(self) -> list[Lot]:
        return [self.ledger.lots[number] for number in sorted(self._pushed)]

    def _outliers(self, lots: Sequence[Lot]) -> list[Lot]:
        norms = {lot.number: self._push(lot.number).notes["norms"] for lot in lots}
        medians = [statistics.median_low(each) for each in zip(*(self._accepted or norms.values()), strict=True)]
        return [
            lot for lot in lots if any(m and n > _MOST_OF_MEDIAN * m for n, m in zip(norms[lot.number], medians, strict=True))
        ]

    @property
    def _accepted(self) -> Sequence[Sequence[float]]:
        """The norms by which pushes are judged, () where too few were accepted: then those of their own merge."""
        return self.ledger.accepted if len(self.ledger.accepted) >= LEAST_ACCEPTED else ()

    @property
    def _judged_by(self) -> str:
        if self._accepted:
            return f"of the last {len(self._accepted)} that were accepted"
        return f"of the merge (fewer than {LEAST_ACCEPTED} were accepted before)"

    def _merge(self, lots: Sequence[Lot]) -> dict[str, Any]:
        version = self.ledger.version
        pushes = [self._push(lot.number) for lot in lots]
        weights = [lot.weight(version) for lot in lots]
        merge = Merge(pushes, weights, self._travel)
        errors = [self._file(f"error-{each}", "float32") for each in (version, version + 1)]
        fed = (errors[0] if errors[0].exists else None, errors[1]) if self._travel.feeds_back else ()
        norm = self._state.merge(merge, version + 1, Change(self._change(version + 1), *fed))
        entries = [
            lot.named(
                staleness=lot.staleness(version),
                tokens=lot.tokens,
                weight=weight / sum(weights),
                loss=push.notes.get("loss"),
                norms=push.notes["norms"],
            )
            for lot, weight, push in zip(lots, weights, pushes, strict=True)
        ]
        ledger = self.ledger.merged(entries, norm=norm)
        assert ledger.line is not None, "it was merged"
        steps = min(ledger.version * self._steps, self.total_steps)
        self._pushed -= {lot.number for lot in lots}
        self._commit(ledger, steps)
        self.journal.append(ledger.line)
        self._tidy()
        self.changed.notify_all()
        return dict(ledger.line)

    def finish(self) -> None:
        """Name what is still open, and let all learners go."""
        with self.changed:
            self.is_over = True
            self._lose(list(self.ledger.lots.values()), "the run ended")
            if self.ledger.lost:
                self.journal.append({"version": self.ledger.version, "lots": [], "lost": list(self.ledger.lost)})
            self.changed.notify_all()

    def _lose(self, lots: Sequence[Lot], reason: str, *, thrown: bool = False) -> None:
        if not lots:
            return
        self._pushed -= {lot.number for lot in lots}
        self._commit(self.ledger.losing(lots, reason, thrown=thrown))
        for lot in lots if thrown else ():
            self._why_thrown[lot.learner] = reason
            self.news.append(f"lot {lot.number} of learner {lot.learner} is thrown out: {reason}")
            if (words := self.why_no_more(lot.learner)) is not None:
                self.news.append(f"{words}; it gets no more rows")
        self._tidy()

    def _commit(self, ledger: LotLedger, steps: int | None = None) -> None:
        self._state.commit(ledger.to_json(), steps)
        self.ledger = ledger

    # -- files ----------------------------------------------------------------------------------------------------------

    def _push(self, number: int) -> NumberFile:
        return self._file(f"push-{number}")

    def _change(self, version: int) -> NumberFile:
        return self._file(f"change-{version}")

    def _whole(self, version: int) -> NumberFile:
        """Return all numbers of the newest version."""
        assert version == self.ledger.version, "only the newest version is whole"
        file, masters = self._file(f"whole-{version}", "float32"), self._state.masters
        if not file.exists:
            file.write(masters.read(unit).numpy() for unit in range(len(masters.counts)))
        return file

    def _file(self, name: str, dtype: str | None = None) -> NumberFile:
        """Return a file of numbers of this type, or as they travel."""
        counts = self._state.masters.counts
        if dtype is None:
            return NumberFile(self._folder / name, self._travel.sizes(counts), self._travel.dtype)
        return NumberFile(self._folder / name, counts, dtype)

    def remove_files(self) -> None:
        """Remove all files, once no learner is sent any."""
        remove_tree(self._folder)

    def _tidy(self) -> None:
        """Remove files that nobody needs: of merges that were broken off, of lots that are closed, of old versions."""
        version = self.ledger.version
        needed = {self._change(each).path for each in range(version - _KEPT_CHANGES + 1, version + 1)}
        needed |= {self._folder / f"{name}-{version}" for name in ("whole", "error")} | {
            *(self._push(number).path for number in self.ledger.lots)
        }
        needed |= {path for path, count in self._in_use.items() if count > 0}
        for path in self._folder.iterdir() if self._folder.exists() else ():
            if path not in needed and path.suffix != ".new":
                path.unlink(missing_ok=True)
