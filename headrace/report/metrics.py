"""`metrics.jsonl`: one JSON object for each step, the record of the run from which everything else is drawn. An evaluation has
a line of its own, after that of its step.

Invariant: each step occurs once, in order, also after crashes, and so does each evaluation. A resumed run drops the lines of
steps that were not committed (and a half-written last line) before it writes its first own.
"""

import json
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

from headrace.files.durable import no_link, write_whole
from headrace.terms.errors import RunDirectoryError
from headrace.terms.events import Committed, Evaluated, Event, Flushed, StepResult

Record = dict[str, Any]
# What each line of a step has, and which values it may be.
_FIGURES: dict[str, Any] = {"loss": int | float | None, "tokens": int, "seconds": int | float}

FIGURES = frozenset((*(each.name for each in fields(StepResult)), "epoch", "lr", "tokens_per_second", "resumed", "flushed"))
"""The names that a line has whatever the loss is."""


def metrics_record(result: StepResult, *, epoch: float | None = None) -> Record:
    """Return the line of one step. NaN and infinity (such as a loss of NaN) become null, so that the file is strict JSON."""
    record: Record = {
        "step": result.step,
        "epoch": None if epoch is None else round(epoch, 6),
        "loss": _finite(result.loss),
        "grad_norm": _finite(result.grad_norm),
        "lr": result.learning_rate,
        "tokens": result.tokens,
        "trained_tokens": result.trained_tokens,
        "seconds": round(result.seconds, 6),
        "tokens_per_second": round(result.tokens_per_second, 3),
    }
    if result.skipped is not None:
        record["skipped"] = result.skipped
    if result.loss_scale is not None:
        record["loss_scale"] = result.loss_scale
    for name in ("bytes_read", "bytes_written", "peak_bytes"):
        record[name] = dict(getattr(result, name))
    if result.io_cpu_seconds is not None:
        record["io_cpu_seconds"] = round(result.io_cpu_seconds, 6)
    if result.estimation_errors:
        record["estimation_errors"] = {
            name: [None if error is None else round(error, 4) for error in errors]
            for name, errors in result.estimation_errors.items()
        }
    return record | {name: _finite(value) for name, value in result.metrics.items()}


def evaluation_record(result: Evaluated) -> Record:
    """Return the line of one evaluation. Its loss is null if it is not finite."""
    return {
        "step": result.step,
        "eval_loss": _finite(result.loss),
        "eval_tokens": result.tokens,
        "eval_seconds": round(result.seconds, 6),
    }


def is_evaluation(record: Record) -> bool:
    """Return whether a line of the file is that of an evaluation."""
    return "eval_loss" in record


def best_of(evaluations: Iterable[Record]) -> Record | None:
    """Return the evaluation with the lowest loss, the first of equal ones; None if no loss is finite."""
    return min(
        (each for each in evaluations if each["eval_loss"] is not None), key=lambda each: each["eval_loss"], default=None
    )


def lowest_so_far(evaluations: Iterable[Record]) -> list[Record]:
    """Return those evaluations that had a lower loss than all before them: each was the best once."""
    found: list[Record] = []
    for each in evaluations:
        if best_of([*found[-1:], each]) is each:
            found.append(each)
    return found


def evaluations_since_best(evaluations: Sequence[Record]) -> int:
    """Return how many evaluations in a row, up to the newest, had no lower loss than all before them."""
    best = best_of(evaluations)
    return sum(best is None or each["step"] > best["step"] for each in evaluations)


def read_metrics(path: Path) -> list[Record]:
    """Return the records of steps in `path` in order, an empty list if there is no such file. Raises as `read_records`."""
    return [record for record in read_records(path) if not is_evaluation(record)]


def read_records(path: Path) -> list[Record]:
    """Return the records of steps and evaluations in `path` in order, an empty list if there is no such file.

    What follows the last good line is left out: a process killed while writing leaves half a line, a power cut may leave zeros.

    Raises:
        RunDirectoryError: a line before the last good one is not JSON, or lacks figures that others of its kind have. Or it is
            no record of a later step than the line before, nor the only evaluation after that step.
    """
    if not path.exists():
        return []
    records: list[Record] = []
    last, is_scored = -1, False
    bad: tuple[int, str] | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # Python reads no numbers of thousands of digits, nor very deep lists
            bad = bad or (number, f"not JSON ({error.msg if isinstance(error, json.JSONDecodeError) else error})")
            continue
        if damaged := _damage_of(record):
            bad = bad or (number, damaged)
            continue
        if bad is not None:
            raise RunDirectoryError(f"{path}, line {bad[0]}: {bad[1]}; restore the file or remove the line")
        step = record.get("step") if isinstance(record, dict) else None
        scored = isinstance(record, dict) and is_evaluation(record)
        if type(step) is not int or not (step == last and not is_scored if scored else step > last):
            found = "no step" if step is None else f"{'an evaluation of ' if scored else ''}step {json.dumps(step)}"
            after = f" after {'the evaluation of ' if is_scored else ''}step {last}" if records else ""
            raise RunDirectoryError(
                f"{path}, line {number}: {found}{after}, expected a later one; restore the file or remove the line"
            )
        if scored and not _is_sound(record):
            raise RunDirectoryError(f"{path}, line {number}: no evaluation ({line[:80]}); restore the file or remove the line")
        last, is_scored = step, scored
        records.append(record)
    return records


def _damage_of(record: Any) -> str:
    """Return what is wrong with the figures of a step's line, "" for nothing. Lines of lanes have neither loss nor tokens."""
    if not isinstance(record, dict) or "step" not in record or is_evaluation(record) or not record.keys() & {"loss", "tokens"}:
        return ""
    for name, kind in _FIGURES.items():
        if name not in record:
            others = ", ".join(sorted(record.keys() - _FIGURES.keys() - {"step"}))
            return f"a step without {name!r}, as if the file was damaged (it has {others[:80]})"
        if not isinstance(record[name], kind) or isinstance(record[name], bool):
            return f"{name!r} is {json.dumps(record[name])[:40]}, as if the file was damaged"
    for name in ("bytes_read", "bytes_written", "peak_bytes"):
        sizes = record.get(name, {})
        if not isinstance(sizes, dict) or not all(type(size) in (int, float) for size in sizes.values()):
            return f"{name!r} is {json.dumps(sizes)[:40]}, as if the file was damaged"
    return ""


def _is_sound(evaluation: Record) -> bool:
    """Return whether the figures of an evaluation are numbers; a loss may be null."""
    figures: list[Any] = [evaluation.get(name) for name in ("eval_loss", "eval_tokens", "eval_seconds")]
    figures[0] = 0 if figures[0] is None else figures[0]
    return all(type(each) in (int, float) and math.isfinite(each) for each in figures)


class MetricsFile:
    """Appends one line for each `StepResult` and each `Evaluated`. `records` are those of steps, `evaluations` the others.

    `committed_steps` is the number of steps whose effect is durable: lines of later steps are removed, because these steps will
    be done again. `steps_per_epoch` gives each line its epoch. The first line that a resumed process writes is marked as
    `resumed`.
    """

    def __init__(self, path: Path, *, committed_steps: int = 0, steps_per_epoch: float | None = None) -> None:
        self._path, self._steps_per_epoch = path, steps_per_epoch
        self._changed = False  # what a flush moved belongs to the last step, whose line is already written
        self._lines = [record for record in read_records(path) if record["step"] <= committed_steps]
        self.records = [record for record in self._lines if not is_evaluation(record)]
        self.evaluations = [record for record in self._lines if is_evaluation(record)]
        self._resumed = bool(self.records)  # and no line has been written since
        write_whole(no_link(path), self._text())
        self._file: TextIO = path.open("a", encoding="utf-8")

    def _text(self) -> str:
        return "".join(json.dumps(record) + "\n" for record in self._lines)

    def _append(self, record: Record, to: list[Record]) -> None:
        to.append(record)
        self._lines.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def __call__(self, event: Event) -> None:
        """Write the line of a step at once, so that a reader (or a crash) sees every finished step."""
        if isinstance(event, StepResult):
            record = metrics_record(event, epoch=event.step / self._steps_per_epoch if self._steps_per_epoch else None)
            if self._resumed:
                record["resumed"], self._resumed = True, False
            self._append(record, self.records)
        elif isinstance(event, Evaluated):
            self._append(evaluation_record(event), self.evaluations)
            os.fsync(self._file.fileno())  # its step is durable, too
        elif isinstance(event, Flushed) and self.records:
            _add(self.records[-1], event)
            self._changed = True
        elif isinstance(event, Committed):
            os.fsync(self._file.fileno())  # the record of a durable step should survive a power cut, as the step does

    def close(self) -> None:
        """Make the file durable and close it."""
        if not self._file.closed:
            with self._file:  # closed in any case: a line that had no space must not be tried again
                self._file.flush()
                os.fsync(self._file.fileno())
            if self._changed:
                write_whole(no_link(self._path), self._text())


def ssd_bytes(record: Record, name: str) -> int:
    """Return the bytes of `name` (`bytes_read` or `bytes_written`) that moved in a step and in the flush after it, if any."""
    return sum(int(amounts.get(name, {}).get("ssd", 0)) for amounts in (record, record.get("flushed", {})))


def steady_ssd_bytes(records: Sequence[Record], name: str) -> float | None:
    """Return the mean bytes of `name` for one step in the middle of a run; None if none were counted.

    Work that a step leaves continues in the next one, or in a flush. So the flush counts with the step after it. The first
    record is left out, and so is the first one after a kill, because neither record has what the killed process left. If all
    records are of these kinds, each counts as it is.
    """
    whole = [(before, record) for before, record in pairwise(records) if "flushed" in before or not record.get("resumed")]
    num_steps = sum("ssd" in record.get(name, {}) for _, record in whole)
    if num_steps:
        own_bytes = sum(int(record.get(name, {}).get("ssd", 0)) for _, record in whole)
        flushed_bytes = sum(int(before.get("flushed", {}).get(name, {}).get("ssd", 0)) for before, _ in whole)
        return (own_bytes + flushed_bytes) / num_steps
    amounts = [ssd_bytes(record, name) for record in records if "ssd" in record.get(name, {})]
    return statistics.fmean(amounts) if amounts else None


def _add(record: Record, moved: Flushed) -> None:
    """Keep what a flush moved separate: the step's own figures are those of a step that is followed by others."""
    known = record.setdefault("flushed", {"bytes_read": {}, "bytes_written": {}, "io_cpu_seconds": 0.0})
    for name in ("bytes_read", "bytes_written"):
        for tier, size in getattr(moved, name).items():
            known[name][tier] = known[name].get(tier, 0) + size
    known["io_cpu_seconds"] = round(known["io_cpu_seconds"] + moved.io_cpu_seconds, 6)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
