"""The files of a run directory that a report can use. Nothing is computed here.

Invariant: only a missing directory is an error. A file that is missing or unreadable becomes a sentence in `missing`, which the
page shows in the place of what it would have drawn.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from headrace.plan.value.plan import Plan
from headrace.plan.value.results import PLAN_NAME
from headrace.report.lanes import LANES_NAME, TIMELINE_NAME, Recording, read_recording
from headrace.report.metrics import Record, is_evaluation, read_metrics, read_records
from headrace.terms.errors import HeadraceError, RunDirectoryError
from headrace.terms.json_text import parse_json
from headrace.terms.machine.ceilings import Ceilings

METRICS_NAME = "metrics.jsonl"
MACHINE_NAME = "machine.json"
CONFIG_NAME = "config.yaml"
SUMMARY_NAME = "summary.json"

_FINAL = "final"
# What a page is drawn from.
FILES = (METRICS_NAME, LANES_NAME, TIMELINE_NAME, PLAN_NAME, MACHINE_NAME, CONFIG_NAME, SUMMARY_NAME, _FINAL)

_T = TypeVar("_T")

# What readers raise for content that no run writes.
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, yaml.YAMLError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The files of a run. `missing` says by file name why one is not there and what makes it. `finished`: there is a model."""

    directory: Path
    metrics: tuple[Record, ...] = ()
    evaluations: tuple[Record, ...] = ()
    lanes: tuple[Record, ...] = ()
    recording: Recording | None = None
    plan: Plan | None = None
    ceilings: Ceilings | None = None
    options: dict[str, Any] | None = None
    outcome: dict[str, Any] | None = None
    missing: dict[str, str]
    finished: bool = False

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None if the options are not known."""
        steps = (self.options or {}).get("max_steps")
        return steps if isinstance(steps, int) else None

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computed: only then is device memory measured."""
        return any("device" in record.get("peak_bytes", {}) for record in self.metrics[-1:])


def read_run(directory: str | Path) -> RunFiles:
    """Return what `directory` holds.

    Raises:
        RunDirectoryError: there is no such directory, or it holds nothing that a run writes.
    """
    path = Path(directory)
    if not path.is_dir():
        raise RunDirectoryError(f"{path}: no such run directory; name the directory that `headrace train` wrote (--output)")
    names = (METRICS_NAME, LANES_NAME, TIMELINE_NAME, PLAN_NAME, CONFIG_NAME)
    if not any((path / name).exists() for name in names):
        raise RunDirectoryError(f"{path}: is no run directory: it holds none of {', '.join(names)}")
    missing: dict[str, str] = {}

    def read(name: str, reader: Callable[[Path], _T], advice: str) -> _T | None:
        file = path / name
        if not file.exists():
            missing[name] = f"{name} is missing: {advice}."
            return None
        try:
            return reader(file)
        except (HeadraceError, OSError, *_DAMAGE) as error:
            missing[name] = f"{name} cannot be read ({' '.join(str(error).split())}): {advice}."
            return None

    steps = partial(_records, fields=_STEP_FIELDS, needed=("step", "seconds", "tokens"))
    lanes = partial(_records, fields=_LANE_FIELDS, needed=_LANE_FIELDS)
    metrics = tuple(read(METRICS_NAME, steps, "a run writes it when its first step is done") or ())
    return RunFiles(
        directory=path,
        metrics=metrics,
        # Where steps could be read, evaluations can be, too.
        evaluations=tuple(each for each in read_records(path / METRICS_NAME) if is_evaluation(each)) if metrics else (),
        lanes=tuple(read(LANES_NAME, lanes, "a run writes it when its lanes are recorded") or ()),
        recording=read(TIMELINE_NAME, read_recording, "a run writes it when its lanes are recorded"),
        plan=read(PLAN_NAME, _plan, "a run on one machine writes it when it starts"),
        ceilings=read(
            MACHINE_NAME,
            lambda file: Ceilings.from_json(parse_json(file.read_text("utf-8"))),
            "it has the figures of the machine, which was not measured; `headrace bench machine` does that for later runs",
        ),
        options=read(CONFIG_NAME, _options, "a run started by `headrace train` writes it"),
        outcome=_outcome(path / SUMMARY_NAME),
        missing=missing,
        finished=(path / _FINAL).is_dir(),
    )


def _plan(file: Path) -> Plan:
    plan = Plan.from_json(parse_json(file.read_text("utf-8")))
    if plan.serves:
        raise RunDirectoryError("it is a node's, and its workers forecast their own steps")
    return plan


def _outcome(path: Path) -> dict[str, Any] | None:
    """Return planned beside measured figures, which a run writes when it stops: before that, nothing is missing."""
    try:
        values = parse_json(path.read_text("utf-8"))
    except (OSError, *_DAMAGE):
        return None
    return values if isinstance(values, dict) else None


def _records(path: Path, fields: Mapping[str, Callable[[Any], bool]], needed: Collection[str]) -> list[Record]:
    """Return the records in a file after checking each of their fields: what is drawn later relies on them."""
    records = read_metrics(path)
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise ValueError(f"line {number} is {str(record)[:60]}")
        if absent := sorted(set(needed) - record.keys()):
            raise ValueError(f"line {number} has no {', '.join(absent)}")
        for name, fits in fields.items():
            if name in record and not fits(record[name]):
                raise ValueError(f"line {number} has {name} {str(record[name])[:60]}")
    return records


def _is_number(value: Any) -> bool:
    # Neither infinity nor NaN, nor whole numbers that are too large for a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _is_count(value: Any) -> bool:
    return _is_number(value) and isinstance(value, int) and value >= 0


def _is_number_or_null(value: Any) -> bool:
    return value is None or _is_number(value)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _is_flushed(value: Any) -> bool:
    if not isinstance(value, dict) or not _is_number(value.get("io_cpu_seconds")):
        return False
    return all(_are_numbers(value.get(name)) for name in ("bytes_read", "bytes_written"))


def _are_lanes(value: Any) -> bool:
    names = ("busy_seconds", "idle_seconds", "bytes")
    return isinstance(value, dict) and all(_are_numbers(use) and all(name in use for name in names) for use in value.values())


_STEP_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "seconds": _is_number,
    "tokens": _is_number,
    "loss": _is_number_or_null,
    "grad_norm": _is_number_or_null,
    "lr": _is_number_or_null,
    "tokens_per_second": _is_number_or_null,
    "io_cpu_seconds": _is_number,
    "bytes_read": _are_numbers,
    "bytes_written": _are_numbers,
    "peak_bytes": _are_numbers,
    "flushed": _is_flushed,
    "resumed": lambda value: isinstance(value, bool),
}
_LANE_FIELDS: Mapping[str, Callable[[Any], bool]] = {"step": _is_count, "seconds": _is_number, "lanes": _are_lanes}


def _options(path: Path) -> dict[str, Any]:
    values = yaml.safe_load(path.read_text("utf-8"))
    if not isinstance(values, dict):
        raise ValueError("not a list of options")
    return values
