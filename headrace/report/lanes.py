"""What each lane did in each step: busy and idle seconds, bytes, and the operations of the last two steps.

`lanes.jsonl` has a line for each step, `timeline.json` has the operations of the two newest. A step is the window from
compute's first operation to the first one of the next step, so every moment of a run belongs to one step. Only the time of an
evaluation belongs to none. Work that continues during the next forward is counted where it happens. Invariants: busy and idle
seconds of a lane add up to the window. The bytes of an operation count once, in the window in which it ended. Operations that
end after the last window are only in the timeline.
At most four steps are held in memory.
"""

import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from headrace.plan.clock.simulate import union_seconds
from headrace.report.metrics import Record, read_metrics
from headrace.terms.errors import RunDirectoryError
from headrace.terms.events import Evaluated, Event, OpDone
from headrace.terms.json_text import UNSOUND, parse_json
from headrace.terms.lanes import Lane
from headrace.terms.program import label_of

LANES_NAME = "lanes.jsonl"
TIMELINE_NAME = "timeline.json"

_VERSION = 1
_COLUMNS = ("lane", "verb", "unit", "micro", "chunk", "start_microseconds", "microseconds", "bytes")
_KEPT_STEPS = 2
_MOST_SAMPLES = 4000
# Writing the timeline may take at most this share of the time, however many operations a step has.
_WRITING_SHARE = 1 / 400

Sampler = Callable[[], Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The operations of one step's program and its window `[begin, begin + seconds)`, on the clock of the recording."""

    step: int
    begin_seconds: float
    seconds: float
    ops: tuple[OpDone, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """What `timeline.json` holds: consecutive steps, oldest first, and samples of memory in use (seconds, bytes per tier)."""

    steps: tuple[RecordedStep, ...]
    memory: tuple[tuple[float, dict[str, int]], ...] = ()


@dataclass(slots=True)
class _Step:
    step: int
    ops: list[OpDone] = field(default_factory=list)
    window: tuple[float, float] = (0.0, 0.0)

    def span(self) -> tuple[float, float]:
        """From compute's first operation to its last; if nothing computes, of all lanes."""
        ops = [op for op in self.ops if op.lane == Lane.COMPUTE] or self.ops
        return min(op.start_seconds for op in ops), max(op.stop_seconds for op in ops)


class LanesFile:
    """Takes the operations of a run and writes `lanes.jsonl` and `timeline.json` into `directory`.

    Lines of steps after `committed_steps` are removed first, because these steps are done again; the first line then written
    says `"resumed": true`. `memory` returns the bytes in use per tier; it is called at most every `memory_every_seconds`. May
    be called from several threads. Cost: a few microseconds for each operation.
    """

    def __init__(
        self,
        directory: Path,
        *,
        committed_steps: int | None = None,
        memory: Sampler | None = None,
        memory_every_seconds: float = 0.02,
        every_seconds: float = 10.0,
    ) -> None:
        self._lock = threading.Lock()
        self._timeline = directory / TIMELINE_NAME
        self._open: dict[int, _Step] = {}
        self._kept: deque[_Step] = deque(maxlen=_KEPT_STEPS)
        self._newest_finished = -1
        self._evaluated: set[int] = set()  # of the steps at hand: their windows end before the evaluation begins
        self._memory, self._memory_every_seconds = memory, memory_every_seconds
        self._samples: deque[tuple[float, Mapping[str, int]]] = deque(maxlen=_MOST_SAMPLES)
        self._next_sample_seconds = float("-inf")
        self._every_seconds, self._next_write_seconds = every_seconds, float("-inf")
        path = directory / LANES_NAME
        kept = [line for line in read_metrics(path) if committed_steps is not None and line["step"] <= committed_steps]
        _replace(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._resumed = bool(kept)

    def __call__(self, event: Event) -> None:
        """Take an operation that has ended, or note an evaluation; other events are ignored."""
        if isinstance(event, Evaluated):
            with self._lock:
                self._evaluated = {step for step in self._evaluated if step >= self._newest_finished} | {event.step}
        if not isinstance(event, OpDone):
            return
        with self._lock:
            step = self._open.get(event.step)
            if step is None:
                step = self._begin(event.step)
            step.ops.append(event)
            if self._memory is not None and event.stop_seconds >= self._next_sample_seconds:
                self._samples.append((event.stop_seconds, self._memory()))
                self._next_sample_seconds = event.stop_seconds + self._memory_every_seconds

    def close(self) -> None:
        """Write the lines of the last steps and the timeline. A second call does nothing."""
        with self._lock:
            if self._file.closed:
                return
            with self._file:  # closed even if there is no space for the last lines
                for number in sorted(self._open):
                    self._finish(number)
                self._write_timeline()

    def _begin(self, number: int) -> _Step:
        # An interpreter begins a program only when the last but one is complete, so no operation of that one can still come.
        for finished in sorted(step for step in self._open if step <= number - 2):
            self._finish(finished)
        step = _Step(number)
        if number > self._newest_finished:
            self._open[number] = step
        return step

    def _finish(self, number: int) -> None:
        step = self._open.pop(number)
        begin, end = step.span()
        following = self._open.get(number + 1)
        if not self._kept or self._kept[-1].step != number - 1 or number - 1 in self._evaluated:
            begin = min(op.start_seconds for op in step.ops)  # the first step: what was fetched ahead belongs to it
        if number in self._evaluated:
            following, end = None, max(op.stop_seconds for op in step.ops)
        step.window = (begin, max(end, following.span()[0]) if following is not None else end)
        before = self._kept[-1].ops if self._kept else []
        # This includes what was done for the next step before its first computation: all of it has been reported by now.
        ahead = following.ops if following is not None else []
        line: Record = {"step": number, "seconds": round(step.window[1] - begin, 6)}
        if self._resumed:
            line["resumed"] = True
            self._resumed = False
        line |= summarise([*before, *step.ops, *ahead], *step.window)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._kept.append(step)
        self._newest_finished = number
        if end >= self._next_write_seconds:
            started = time.perf_counter()
            self._write_timeline()
            pause = max(self._every_seconds, (time.perf_counter() - started) / _WRITING_SHARE)
            self._next_write_seconds = end + pause

    def _write_timeline(self) -> None:
        if self._kept:
            steps = [
                RecordedStep(step.step, step.window[0], step.window[1] - step.window[0], tuple(step.ops)) for step in self._kept
            ]
            _replace(self._timeline, json.dumps(_encode(steps, self._samples), separators=(",", ":")) + "\n")


def summarise(ops: Sequence[OpDone], begin_seconds: float, end_seconds: float) -> Record:
    """Return what lanes did in the window: `lanes` (busy and idle seconds, bytes) and `verbs` (seconds, bytes, operations).

    A lane is busy while at least one operation runs; the seconds of a verb add up, so simultaneous ones count several times.
    """
    lanes: dict[str, list[tuple[float, float]]] = defaultdict(list)
    lane_bytes: dict[str, int] = defaultdict(int)
    verbs: dict[str, list[float]] = defaultdict(lambda: [0.0, 0, 0])
    for op in ops:
        if op.stop_seconds <= begin_seconds or op.start_seconds >= end_seconds:
            continue
        lanes[op.lane].append((max(op.start_seconds, begin_seconds), min(op.stop_seconds, end_seconds)))
        if op.stop_seconds <= end_seconds:
            lane_bytes[op.lane] += op.bytes
            verb = verbs[op.verb]
            verb[0] += op.stop_seconds - op.start_seconds
            verb[1] += op.bytes
            verb[2] += 1
    window_seconds = end_seconds - begin_seconds
    busy = {lane: min(union_seconds(spans), window_seconds) for lane, spans in lanes.items()}
    return {
        "lanes": {
            str(lane): {
                "busy_seconds": round(busy[lane], 6),
                "idle_seconds": round(window_seconds - busy[lane], 6),
                "bytes": lane_bytes[lane],
            }
            for lane in lanes
        },
        "verbs": {
            str(verb): {"seconds": round(seconds, 6), "bytes": int(num_bytes), "operations": int(count)}
            for verb, (seconds, num_bytes, count) in verbs.items()
        },
    }


def read_recording(path: Path) -> Recording:
    """Return what `timeline.json` holds.

    Raises:
        RunDirectoryError: the file is missing, or is no timeline.
    """
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
        if values["version"] != _VERSION:
            raise RunDirectoryError(
                f"{path}: timeline version {values['version']!r}, expected {_VERSION}; read it with the program that wrote it"
            )
        return _decode(values)
    except OSError as error:
        raise RunDirectoryError(
            f"{path}: cannot be read ({error.strerror}); a run writes it when its second step is done"
        ) from error
    except UNSOUND as error:
        if isinstance(error, RunDirectoryError):
            raise
        raise RunDirectoryError(
            f"{path}: is no timeline of a run ({error!r}); remove the file, the next run writes it anew"
        ) from error


def _encode(steps: Sequence[RecordedStep], samples: Iterable[tuple[float, Mapping[str, int]]]) -> dict[str, Any]:
    """Return the file's content, in columns instead of objects, because a step has thousands of operations."""
    origin = min(min(op.start_seconds for op in step.ops) for step in steps)
    lanes, verbs = _Numbers(), _Numbers()
    encoded = [
        {
            "step": step.step,
            "begin_seconds": round(step.begin_seconds - origin, 6),
            "seconds": round(step.seconds, 6),
            "ops": [
                [
                    lanes[op.lane],
                    verbs[op.verb],
                    op.unit,
                    op.micro,
                    op.chunk,
                    round((op.start_seconds - origin) * 1e6),
                    round((op.stop_seconds - op.start_seconds) * 1e6),
                    op.bytes,
                ]
                for op in step.ops
            ],
        }
        for step in steps
    ]
    memory = [[round(seconds - origin, 6), dict(tiers)] for seconds, tiers in samples if seconds >= origin]
    return {
        "version": _VERSION,
        "columns": _COLUMNS,
        "lanes": [str(lane) for lane in lanes],
        "verbs": [str(verb) for verb in verbs],
        "steps": encoded,
        "memory": memory,
    }


class _Numbers(dict[str, int]):
    """Numbers names in the order in which they are first asked for."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]


def _decode(values: Mapping[str, Any]) -> Recording:
    lanes, verbs = values["lanes"], values["verbs"]
    steps = []
    for step in values["steps"]:
        ops = []
        for lane, verb, unit, micro, chunk, start, length, num_bytes in step["ops"]:
            ops.append(
                OpDone(
                    step=step["step"],
                    label=label_of(verbs[verb], unit=unit, micro=micro, chunk=chunk),
                    verb=verbs[verb],
                    lane=lanes[lane],
                    unit=unit,
                    micro=micro,
                    chunk=chunk,
                    start_seconds=start / 1e6,
                    stop_seconds=(start + length) / 1e6,
                    bytes=num_bytes,
                )
            )
        steps.append(RecordedStep(step["step"], step["begin_seconds"], step["seconds"], tuple(ops)))
    return Recording(tuple(steps), tuple((seconds, tiers) for seconds, tiers in values["memory"]))


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
