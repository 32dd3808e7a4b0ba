"""A run of the engine that somebody else's loop drives, with the records that `headrace train` keeps in a run directory.

Invariant: what is recorded of a step is what `headrace train` records, so `headrace report` and `headrace watch` read both.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headrace.files.durable import write_whole
from headrace.files.yaml_options import to_yaml
from headrace.losses.router import PLUS, TRAINED
from headrace.machine.host_memory import anonymous_bytes
from headrace.machine.meter import MemoryMeter
from headrace.plan.value.plan import Plan
from headrace.report import LanesFile, MetricsFile, Reporters
from headrace.report.metrics import Record
from headrace.runs.account import Account
from headrace.runs.counted import for_people
from headrace.runs.engines import opened_engine as open_engine
from headrace.runs.engines import resumed_engine as resume_engine
from headrace.runs.measuring import MachineHere, MachineOfRun
from headrace.runs.protocols import RunningEngine
from headrace.runs.replanning import PlanInUse
from headrace.store.run_directory import RunDirectory
from headrace.terms.closing import Closing
from headrace.terms.errors import RunDirectoryError
from headrace.terms.events import Evaluated, Event, Notice, StepResult
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.run_options import RunOptions
from headrace.terms.packed_rows import PackedRows

Say = Callable[[str, str], None]
"""Tells a person a text, as `info` or `warning`."""


class EngineRun(Closing):
    """An open run: `step` and `evaluate` between which anything may happen. `begin` and `resume` make it."""

    def __init__(
        self, engine: RunningEngine, config: RunOptions, account: Account | None, reporters: Reporters, closers: ExitStack
    ) -> None:
        self.engine, self.config, self._reporters, self._closers = engine, config, reporters, closers
        self.directory = RunDirectory(Path(str(config.output)))
        self._plans = PlanInUse(account, engine, reporters, self._account_of, may_change=config.may_replan)
        self._taken: list[float] = []
        self._meter = closers.enter_context(MemoryMeter())
        self._metrics: MetricsFile | None = None

    @classmethod
    def begin(cls, config: RunOptions, say: Say, packed: PackedRows | None = None) -> "EngineRun":
        """Begin the run that `config` describes, whose lengths and steps are decided; `packed` are its first rows.

        Raises:
            InputError: the run directory is taken; or the model, a directory or an option cannot be used.
            PlanInfeasible: the budgets are too small.
        """
        directory = RunDirectory(Path(str(config.output)))
        told: list[Account] = []
        with ExitStack() as closers:
            reporters = _screen(closers, say)
            machine = MachineOfRun(_machine(config), total_steps=config.max_steps or 1, sink=reporters)

            def tell(plan: Plan) -> None:
                known = replace(config, machine=machine.ceilings or config.machine)
                told.append(_account(known, plan))
                told[0].tell_before(_Said(say))

            begun = directory.config.exists()  # and killed before its first commit: `resumed` has removed its state
            if begun:
                write_whole(directory.config, to_yaml(config))
            made = () if begun else directory.write_config(config)
            try:
                options = replace(config, machine=machine.ceilings or config.machine)
                engine = open_engine(config.model, options, for_people(reporters, tell), measure=machine, packed=packed)
            except BaseException:
                if not begun:
                    directory.forget(made)
                raise
            closers.enter_context(engine)
            return cls(engine, config, told[0] if told else None, reporters, closers.pop_all())

    @classmethod
    def resume(cls, path: Path, say: Say) -> "EngineRun":
        """Go on with the run in the directory `path` after its newest commit.

        Raises:
            RunDirectoryError: there is no run, or another process works on it, or its model has changed.
            CorruptData: its state is damaged.
        """
        config = RunDirectory(path).read_config()
        with ExitStack() as closers:
            reporters = _screen(closers, say)
            engine = closers.enter_context(resume_engine(path, sink=for_people(reporters)))
            account = _account(config, engine.plan) if engine.plan is not None else None
            return cls(engine, config, account, reporters, closers.pop_all())

    def record(self, steps_per_epoch: float) -> None:
        """Begin to record steps."""
        if self._metrics is None:
            done = self.engine.step_index
            with self.directory.writing():
                file = MetricsFile(self.directory.metrics, committed_steps=done, steps_per_epoch=steps_per_epoch)
            self._metrics = self._reporters.add(file)
            self._reporters.add(
                LanesFile(self.directory.path, committed_steps=done, memory=lambda: {"host": anonymous_bytes()})
            )

    @property
    def router_note(self) -> str | None:
        """What the plan says of the part of a mixture's router in the loss; None for other models."""
        notes = self.engine.plan.results.notes if self.engine.plan is not None else ()
        return next((note for note in notes if note.startswith(TRAINED)), None)

    @property
    def adds_router_loss(self) -> bool:
        """Whether the router has a part in the loss."""
        return self.router_note is not None and PLUS in self.router_note

    @property
    def records(self) -> list[Record]:
        """The records of steps."""
        return self._metrics.records if self._metrics is not None else []

    def step(
        self, batch: Mapping[str, torch.Tensor], *, learning_rate: float, position: Any, router_rows: int = 0
    ) -> StepResult:
        """Take one step; the result counts from 1. `router_rows`: see `RunningEngine`. Raises as `Engine.step`."""
        self.engine.router_rows = router_rows
        result = self.engine.step(batch, position=position, learning_rate=learning_rate)
        result = replace(result, step=self.engine.step_index)
        self._reporters(result)
        if (failure := self._reporters.failure) is not None:
            raise self.directory.unwritable(failure) from failure
        self._taken.append(result.seconds)
        self._plans.after_step(self._taken, steps_left=(self.config.max_steps or result.step) - result.step)
        return result

    def evaluate(self, batches: Iterable[Mapping[str, torch.Tensor]], *, recorded: bool) -> tuple[float, int]:
        """Return the mean loss of all trained tokens of `batches`, and how many these are; `recorded` in metrics.jsonl, too.
        A mixture's router has its part in the loss of each of `batches`.

        Raises:
            StepFailed: a lane failed; the last committed step is untouched.
        """
        self.engine.flush()
        self.engine.router_rows = 0
        started, total, tokens = time.perf_counter(), 0.0, 0
        for batch in batches:
            found = self.engine.evaluate(batch)
            total, tokens = total + found.loss * found.tokens, tokens + found.tokens
        if not tokens:
            return float("nan"), 0
        step, seconds = self.engine.step_index, time.perf_counter() - started
        if recorded and self._metrics is not None and self._metrics.records and step not in self._evaluated:
            self._reporters(Evaluated(step=step, loss=total / tokens, tokens=tokens, seconds=seconds))
        return total / tokens, tokens

    @property
    def _evaluated(self) -> set[int]:
        return {record["step"] for record in self._metrics.evaluations} if self._metrics else set()

    def sum_up(self) -> None:
        """Make everything durable, and write planned beside measured figures."""
        self.engine.flush()
        if (account := self._plans.account) is not None and self._metrics is not None:
            account.sum_up(self._metrics.records, self._metrics.evaluations, host_peak_bytes=self._meter.peak_bytes())

    def _account_of(self, plan: Plan, machine: Ceilings) -> Account:
        return _account(self.config, plan, machine)

    def close(self) -> None:
        """Close the engine and the records."""
        self._closers.close()


def refuse_taken(path: Path) -> None:
    """Refuse a directory that holds anything.

    Raises:
        RunDirectoryError: it does; the message says how to go on with a run.
    """
    directory = RunDirectory(path)
    if path.is_dir() and directory.config.exists():
        raise RunDirectoryError(
            f"output_dir: {path} holds a run; train(resume_from_checkpoint=True) goes on with it, or give another output_dir"
        )
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise RunDirectoryError(f"output_dir: {path} holds other files; a run needs a directory of its own: give another one")


def _screen(closers: ExitStack, say: Say) -> Reporters:
    """Return reporters that pass notices on."""
    reporters = Reporters()
    closers.callback(reporters.close)
    reporters.add(_Notices(say))
    return reporters


class _Notices:
    def __init__(self, say: Say) -> None:
        self._say = say

    def __call__(self, event: Event) -> None:
        """Pass a notice on."""
        if isinstance(event, Notice):
            self._say(event.text, event.level)

    def close(self) -> None:
        """Do nothing: nothing is held."""


class _Said:
    """A display that has lines only."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def say(self, text: str) -> None:
        """Show lines of text once."""
        self._say(text, "info")

    def progress(self, total_steps: int) -> _Notices:
        """Return a reporter of notices: the Trainer has its own progress."""
        return _Notices(self._say)


def _account(config: RunOptions, plan: Plan, ceilings: Ceilings | None = None) -> Account:
    """Return the account of a run's plan; `ceilings` stand in for those with which it began."""
    directory = RunDirectory(Path(str(config.output)))
    return Account(plan, config.model, directory, _machine(config), config.max_steps or 1, ceilings=ceilings)


def _machine(config: RunOptions) -> MachineHere:
    return MachineHere.of(config, config.budget.ssd or (Path(str(config.output)),))
