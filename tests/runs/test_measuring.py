"""A long run measures its machine once; the next one plans by what was kept. No test here measures anything itself.

Run: pytest tests/runs/test_measuring.py
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training_fakes import FakeHost, Screen, fake_plan, run_options

from headrace.apps import read_run
from headrace.machine.cpu import CpuMachine
from headrace.measure import brief
from headrace.measure.kept import Wanted, keep
from headrace.plan.clock.machine_profiles import load_profile
from headrace.plan.clock.nominal import nominal_machine
from headrace.plan.forecast.forecast import forecast
from headrace.runs import RunOptions, measuring, resume, train
from headrace.runs.measuring import MachineHere, MachineOfRun
from headrace.terms.errors import DiskFull
from headrace.terms.events import Event, Notice, StepResult
from headrace.terms.machine.ceilings import Ceilings

NOMINAL_SECONDS = forecast(fake_plan(), nominal_machine(1, host_bytes=4096, device_bytes=None)).step_seconds
LONG = int(1000 / NOMINAL_SECONDS)


def found(rate: float = 1e12) -> Ceilings:
    """What a measurement might find."""
    machine = load_profile("rtx4090-1ssd")
    drive = replace(machine.drives[0], threads_per_direction=None, piece_bytes=None)
    return replace(machine, name="measured here", drives=(drive,), flops_per_second={"bfloat16": rate})


class Measurer:
    """Stands in for the measurement, and counts how often it is asked."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        self.fails: Exception | None = None
        self.held, self.while_waiting = True, lambda: None
        self.looked = 1e12
        patch.setattr(brief, "measure_briefly", self.measure)
        patch.setattr(brief, "look_at_products", lambda machine, dtype: self.looked)
        patch.setattr(measuring, "alone", self.alone)

    def measure(self, machine: Any, directories: Any, dtype: str, room: Any) -> Ceilings:
        self.asked.append((directories, dtype, room))
        if self.fails is not None:
            raise self.fails
        return found(1e12 * len(self.asked))  # no two measurements agree

    @contextlib.contextmanager
    def alone(self, wait_seconds: float) -> Iterator[bool]:
        self.while_waiting()
        yield self.held


@pytest.fixture
def measurer(monkeypatch: pytest.MonkeyPatch) -> Measurer:
    return Measurer(monkeypatch)


def machine_of(folder: Path, steps: int, told: list[Event] | None = None, **options: Any) -> MachineOfRun:
    (folder / "run").mkdir(exist_ok=True)
    given = {"model": "m", "data": "d", "cache": folder / "cache"} | options
    asked = RunOptions.of(given)
    here = MachineHere.of(asked, asked.budget.ssd or (folder / "run",))
    return MachineOfRun(here, total_steps=steps, sink=(told if told is not None else []).append)


def words(told: list[Event]) -> list[str]:
    return [event.text for event in told if isinstance(event, Notice)]


def test_a_short_run_is_not_worth_measuring(tmp_path: Path, measurer: Measurer) -> None:
    told: list[Event] = []
    assert machine_of(tmp_path, 8, told)(fake_plan(), CpuMachine()) is None
    assert (measurer.asked, told) == ([], [])


def test_a_long_run_measures_and_says_so_and_the_next_one_uses_what_was_kept(tmp_path: Path, measurer: Measurer) -> None:
    told: list[Event] = []
    first = machine_of(tmp_path, LONG, told)
    assert first.ceilings is None
    assert first(fake_plan(), CpuMachine()) == first.ceilings == found()
    assert measurer.asked[0][:2] == ((tmp_path / "run",), "bfloat16")
    assert words(told)[0].startswith("measuring this machine for at most 10 s")
    assert "kept for later runs in " in words(told)[1]
    # Another measurement would find other rates, and by these another plan might be chosen.
    second = machine_of(tmp_path, 2 * LONG)
    assert second.ceilings == found()
    assert second(fake_plan(), CpuMachine()) == found()
    assert machine_of(tmp_path, 8).ceilings == found()
    assert len(measurer.asked) == 1


def test_it_can_be_left_out_and_a_profile_needs_none(tmp_path: Path, measurer: Measurer) -> None:
    assert machine_of(tmp_path, LONG, measure=False)(fake_plan(), CpuMachine()) is None
    profiled = machine_of(tmp_path, LONG, machine="rtx4090-1ssd")
    assert profiled.ceilings is None
    assert profiled(fake_plan(), CpuMachine()) is None
    assert measurer.asked == []


@pytest.mark.parametrize(("rate", "measures"), [(1e15, False), (1e6, True)])
def test_of_a_run_that_usual_figures_put_at_a_minute_products_are_looked_at(
    tmp_path: Path, measurer: Measurer, rate: float, measures: bool
) -> None:
    measurer.looked = rate
    machine_of(tmp_path, int(60 / NOMINAL_SECONDS))(fake_plan(), CpuMachine())
    assert bool(measurer.asked) is measures


def test_who_waits_for_another_process_uses_what_that_found(tmp_path: Path, measurer: Measurer) -> None:
    asked = Wanted(directories=(tmp_path / "run",), compute_dtype="bfloat16")
    machine = machine_of(tmp_path, LONG)
    measurer.while_waiting = lambda: keep(tmp_path / "cache", asked, found(7e12))  # type: ignore[assignment,return-value]
    assert machine(fake_plan(), CpuMachine()) == found(7e12)
    assert measurer.asked == []


def test_who_waits_in_vain_or_cannot_measure_goes_on_without(tmp_path: Path, measurer: Measurer) -> None:
    told: list[Event] = []
    measurer.held = False
    assert machine_of(tmp_path, LONG, told)(fake_plan(), CpuMachine()) is None
    assert measurer.asked == []
    assert "another process has been measuring for too long" in words(told)[-1]
    measurer.held, measurer.fails = True, DiskFull("the drive is full")
    assert machine_of(tmp_path, LONG, told)(fake_plan(), CpuMachine()) is None
    assert words(told)[-1] == "not measured: the drive is full; times are guesses"


def test_what_is_measured_stays_inside_the_plan(tmp_path: Path, measurer: Measurer) -> None:
    machine_of(tmp_path, LONG)(fake_plan(), CpuMachine())
    assert measurer.asked[0][2].host_bytes < fake_plan().peak("host")


def test_a_run_is_planned_shown_and_resumed_by_what_was_measured(tmp_path: Path, measurer: Measurer) -> None:
    """The engine asks for it with its first plan; table, record and report have it without a file copied by hand."""

    class Asking(FakeHost):
        def open(self, model: Path, options: Any, sink: Any, *, measure: Any = None, packed: Any = None) -> Any:
            self.got = measure(fake_plan(), CpuMachine())
            return super().open(model, options, sink)

    options = run_options(tmp_path, max_steps=LONG)
    screen = Screen()
    host = Asking(script={3: interrupt})
    with pytest.raises(KeyboardInterrupt):
        train(RunOptions.of(options), display=screen, engines=host.engines())
    assert host.got == found()
    assert "machine   measured here" in screen.said[-1]
    assert json.loads((tmp_path / "run" / "machine.json").read_text())["name"] == "measured here"
    assert read_run(tmp_path / "run").ceilings == found()
    with pytest.raises(KeyboardInterrupt):
        resume(tmp_path / "run", display=screen, engines=FakeHost(script={5: interrupt}).engines())
    assert len(measurer.asked) == 1


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("steps", "said"), [(8, False), (400, True)])
def test_after_three_steps_a_forecast_that_was_wrong_is_set_right(tmp_path: Path, steps: int, said: bool) -> None:
    """The fake engine's steps take 0.25 s, hundreds of times what its plan says; of a few of them nobody needs to hear."""
    screen = Screen()
    options = run_options(tmp_path, max_steps=steps, measure=False)
    with pytest.raises(KeyboardInterrupt):
        train(RunOptions.of(options), display=screen, engines=FakeHost(script={5: interrupt}).engines())
    told = [index for index, event in enumerate(screen.events) if isinstance(event, Notice) and "were forecast" in event.text]
    assert bool(told) is said
    if said:
        before = [event.step for event in screen.events[: told[0]] if isinstance(event, StepResult)]
        assert before == [1, 2, 3]
        assert screen.events[told[0]].text.endswith("1 min 39 s are left")  # 397 times 0.25 s
