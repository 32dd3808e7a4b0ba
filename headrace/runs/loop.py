"""The run from first to last step: `train` begins one, `resume` continues one. This is the page to read first.

Invariant: the position in the data is committed with the step that consumed it. So a resumed run sees the next sample and no
sample twice. `metrics.jsonl` has each step once.
"""

import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.data import Batch, BatchStream
from headrace.data.batches.open_data import step_tensors_of
from headrace.data.batches.prompt_batches import PromptBatches
from headrace.losses import loss_of
from headrace.losses.grpo import Grpo
from headrace.machine.host_memory import anonymous_bytes
from headrace.machine.meter import MemoryMeter
from headrace.machine.near_limit import NearLimit
from headrace.plan.search.serving import explain_serving, grouping_of
from headrace.plan.value.plan import Plan
from headrace.report import LanesFile, MetricsFile, Reporters, TensorBoard, TraceFile, TrainerStateFile
from headrace.report.completions import COMPLETIONS_NAME, CompletionsFile
from headrace.report.trackers import TRACKERS, Tracker
from headrace.report.trainer_state import of_run, trainer_state
from headrace.runs.checkpoints import Checkpoints, CheckpointWriter
from headrace.runs.counted import for_people
from headrace.runs.evaluating import Evaluations, RunEvaluator
from headrace.runs.finish import keep_model, write_final
from headrace.runs.job import Job, resolve, resolve_begun
from headrace.runs.measuring import MachineOfRun
from headrace.runs.pausing import Pauses
from headrace.runs.protocols import Display, Engines, NoDisplay, RunningEngine, StateKind
from headrace.runs.references import References
from headrace.runs.replanning import PlanInUse
from headrace.runs.rollouts import FOLDER, Beside, Rollouts
from headrace.runs.signals import Interrupted, SaveRequest, StopRequest
from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import StorageError
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.run_options import RunOptions
from headrace.terms.sizes import format_seconds

if TYPE_CHECKING:
    from headrace.runs.account import Account


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run that is done: its directory, its model, and the number of steps it took."""

    run_directory: Path
    final: Path
    steps: int


@dataclass(frozen=True, slots=True)
class _Run:
    """What one process works with; `meter` and `saving` began with it."""

    job: Job
    display: Display
    meter: MemoryMeter
    saving: SaveRequest
    checkpoints: Checkpoints

    @classmethod
    def of(cls, job: Job, display: Display | None, meter: MemoryMeter, saving: SaveRequest) -> "_Run":
        """Return what works on a job, whose notes are shown."""
        display = display or NoDisplay()
        for note in job.notes:
            display.say(f"note: {note}")
        return cls(job, display, meter, saving, Checkpoints(job.options, Evaluations(job.options, job.rows, job.steps)))

    @property
    def evaluations(self) -> Evaluations:
        """The run's evaluations."""
        return self.checkpoints.evaluations

    @property
    def directory(self) -> RunDirectory:
        """The run's directory."""
        return self.job.directory


def train(config: RunOptions, *, display: Display | None = None, engines: Engines | None = None) -> Finished:
    """Run `config` from the first step to the last and return where the model is.

    Raises:
        InputError: model, data, options or run directory cannot be used; nothing is left behind.
        PlanInfeasible: the budgets are too small.
        StorageError, StepFailed: the run broke, or a disk is full; `resume` goes on after the cause is removed.
        Interrupted: SIGINT or SIGTERM came; the run can be resumed.
    """
    with MemoryMeter() as meter, SaveRequest() as saving:
        job = resolve(config, engines)
        run = _Run.of(job, display, meter, saving)
        made = job.directory.write_config(job.options)
        return _begin(run, on_failure=lambda: job.directory.forget(made))


def resume(run_directory: str | Path, *, display: Display | None = None, engines: Engines | None = None) -> Finished:
    """Continue a run after its last committed step, whatever ended it, and return where the model is.

    Raises:
        RunDirectoryError: there is no run, it is finished, or another process works on it.
        CorruptData: the state does not have the checksums it was written with.
        DataError: the data is not that with which the run began.
        Interrupted: as for `train`.
    """
    with MemoryMeter() as meter, SaveRequest() as saving:
        job = resolve_begun(RunDirectory(Path(run_directory).absolute()), engines)
        run = _Run.of(job, display, meter, saving)
        if job.left is StateKind.COMMITTED:
            return _resume(run)
        job.engines.discard(job.directory.path)  # killed while the model was imported: there is nothing to resume
        return _begin(run)


def _resume(run: _Run) -> Finished:
    job = run.job

    def tell(plan: Plan) -> None:
        if plan.serves:
            _tell_serving(run, plan)

    with ExitStack() as stack:
        reporters = _reporters(run, stack)
        engine = stack.enter_context(job.engines.resume(job.directory.path, sink=for_people(reporters, tell)))
        if engine.position is not None:
            job.rows.restore(engine.position["data"])
            if job.rows.by_earlier_rules:
                run.display.say(
                    "note: the run keeps the tokens that it began with; earlier rules chose which of them are trained"
                )
        account = _account(run, engine.plan) if engine.plan is not None and not engine.plan.serves else None
        words = f": {account.in_short(steps_left=job.steps - engine.step_index)}" if account else ""
        run.display.say(f"resuming {job.directory.path} after step {engine.step_index} of {job.steps}{words}")
        return _drive(run, engine, reporters, account)


def _begin(run: _Run, on_failure: Callable[[], None] | None = None) -> Finished:
    """Open a new engine and drive it. If it cannot be opened, `on_failure` undoes what was made before."""
    job, told = run.job, list["Account"]()

    with ExitStack() as stack:
        reporters = _reporters(run, stack)
        machine = MachineOfRun(job.machine, total_steps=job.steps, sink=reporters)

        def tell(plan: Plan) -> None:
            if plan.serves:  # its workers forecast
                _tell_serving(run, plan)
                return
            told.append(_account(run, plan, machine.ceilings))
            told[0].tell_before(run.display)

        options = job.options
        if machine.ceilings is not None or options.output != run.directory.path:  # a run that was moved before its first commit
            options = replace(options, output=run.directory.path, machine=machine.ceilings or options.machine)
        packed = job.rows.first_rows(job.steps)
        try:
            engine = job.engines.open(options.model, options, for_people(reporters, tell), measure=machine, packed=packed)
        except BaseException:
            if on_failure is not None:
                on_failure()
            raise
        stack.enter_context(engine)
        return _drive(run, engine, reporters, told[0] if told else None)


def _drive(run: _Run, engine: RunningEngine, reporters: Reporters, account: "Account | None") -> Finished:
    """Take the steps that are left, then finish. The caller closes the engine and the reporters, in this order. `account`
    reports on the plan, which has already been shown; a node's, which has no forecast, is made at the end.
    """
    options = run.job.options
    plans = PlanInUse(account, engine, reporters, partial(_account, run, found=True), may_change=options.may_replan)
    with run.directory.writing():
        metrics = _files(run, reporters, engine.step_index)

    summary = partial(_summed_up, run, engine, plans, metrics)
    started, taken = time.monotonic(), list[float]()
    with StopRequest() as stop, ExitStack() as closing:

        def heed() -> None:
            if stop.received is not None:
                raise _interrupted(run, engine.step_index, stop.received)

        run.job.engines.heed(heed)
        pauses = Pauses.of(options.max_write_per_day, run.directory.path, engine, lambda: stop.received is not None, reporters)
        tensors, of_held_out, logged = _makers(run, engine, metrics, lambda: stop.received is not None, closing)
        evaluator, keeper = _between_steps(run, engine, reporters, metrics, lambda: stop.received is not None)
        evaluator = replace(evaluator, tensors=of_held_out)

        def look_after_step() -> None:
            """Evaluate, and keep a checkpoint. What was broken off by a kill is done again first."""
            evaluator.evaluate_if_due()
            if stop.received is None:
                keeper.keep_if_due()

        look_after_step()
        while (
            engine.step_index < run.job.steps
            and stop.received is None
            and reporters.failure is None
            and not evaluator.plan.over(metrics.evaluations)
        ):
            if (batch := tensors(run.job.rows.next_batch())) is None:
                break
            result = engine.step(batch, position={"data": run.job.rows.state()})
            reporters(replace(result, step=engine.step_index, metrics={**result.metrics, **logged()}))
            taken.append(result.seconds)
            if stop.received is None and reporters.failure is None:
                plans.after_step(taken, steps_left=run.job.steps - engine.step_index)
                look_after_step()
                if engine.step_index < run.job.steps:
                    pauses.after_step(result)
        engine.flush()
        _say(run, "\n".join(run.job.rows.left_out))
        keeper.close()
        reporters.close()
        if reporters.failure is not None:
            raise run.directory.unwritable(reporters.failure) from reporters.failure
        if stop.received is not None:
            _say(run, summary())
            raise _interrupted(run, engine.step_index, stop.received)
    _finish(run, engine, metrics, summary)
    steps, seconds = engine.step_index, format_seconds(time.monotonic() - started)
    run.display.say(f"done: {steps} steps, {seconds}; model in {run.directory.final}")
    return Finished(run_directory=run.directory.path, final=run.directory.final, steps=steps)


def _summed_up(run: _Run, engine: RunningEngine, plans: PlanInUse, metrics: MetricsFile) -> str:
    """Write the figures of the whole run; return them in words."""
    told = _account(run, engine.plan) if engine.plan is not None and engine.plan.serves else plans.account
    if told is None:
        return ""
    return told.sum_up(metrics.records, metrics.evaluations, host_peak_bytes=run.meter.peak_bytes())


def _finish(run: _Run, engine: RunningEngine, metrics: MetricsFile, summary: Callable[[], str]) -> None:
    """Write the model of a run whose steps are taken, with its `summary`, and remove the state."""
    if engine.step_index < run.job.steps:
        patience = run.job.options.early_stopping_patience
        run.display.say(f"stopped early: {patience} evaluations in a row had no lower loss than the best before them")
    words = summary()  # before the model, which is the last that may fail
    try:
        if note := write_final(engine, run.directory, run.checkpoints, metrics.records, metrics.evaluations):
            run.display.say(f"note: {note}")
        with suppress(StorageError):  # the figures before the model are there
            words = summary()  # writing the model also takes memory
    finally:
        _say(run, words)
    if not run.job.options.keep_state:
        engine.remove_state()


def _makers(
    run: _Run, engine: RunningEngine, metrics: MetricsFile, heed: Callable[[], bool], closing: ExitStack
) -> tuple[Callable[[Batch], Any], Callable[[Batch], Any], Callable[[], Mapping[str, float]]]:
    """Return what makes tensors of a step's batch (None: the run is to stop), and of held-out rows, and figures of the step
    that are no loss's; `closing` ends it.
    """
    job, loss = run.job, loss_of(run.job.options.loss)
    if loss is not None and loss.takes_reference:
        assert isinstance(job.rows, BatchStream), "a loss of pairs is refused where data are streamed"
        references = References(job.options, job.rows)
        started = time.monotonic()
        if made := references.make(engine, run.evaluations, heed):
            seconds = format_seconds(time.monotonic() - started)
            run.display.say(f"reference: {made} rows scored before the first step, {seconds}")
        return references.beside, partial(references.beside, held_out=True), dict
    if not isinstance(loss, Grpo):
        return step_tensors_of, step_tensors_of, dict
    assert isinstance(job.rows, PromptBatches), "such a loss reads prompts"
    beside = Beside(
        CompletionsFile(run.directory.path / COMPLETIONS_NAME, committed_steps=engine.step_index),
        lambda: trainer_state(metrics.records, metrics.evaluations, **_of_run(job)),
        run.display.say,
    )
    rollouts = Rollouts(job.options, job.rows, loss, engine, run.directory.path / FOLDER, beside)
    closing.callback(rollouts.close)
    return partial(rollouts.rows, heed=heed), step_tensors_of, lambda: rollouts.figures


def _between_steps(
    run: _Run, engine: RunningEngine, reporters: Reporters, metrics: MetricsFile, heed: Callable[[], bool]
) -> tuple[RunEvaluator, CheckpointWriter]:
    """Return what evaluates, and what keeps models, between steps; `heed` says whether the run is to stop."""
    return RunEvaluator(run.evaluations, engine, metrics.evaluations, reporters, heed), CheckpointWriter(
        run.checkpoints,
        engine,
        run.directory,
        metrics.evaluations,
        reporters,
        run.saving,
        lambda path: keep_model(engine, path, run.job.options),
    )


def _say(run: _Run, words: str) -> None:
    if words:
        run.display.say(words)


def _tell_serving(run: _Run, plan: Plan) -> None:
    """Say what a node's plan is; once its workers have agreed upon what decides bits, keep it, for other runs to take."""
    if grouping_of(plan) is None:
        run.display.say(explain_serving(plan))
    else:
        run.directory.write_plan(plan.to_json())


def _account(run: _Run, plan: Plan, measured: Ceilings | None = None, *, found: bool = False) -> "Account":
    """Return the account of the engine's plan. `measured` are figures of the machine that the configuration does not name; if
    the run itself `found` them, they stand in for those with which it began.
    """
    from headrace.runs.account import Account  # late, for the same reason as the engine

    job, between = run.job, run.checkpoints.between_steps()
    machine = job.machine if measured is None else replace(job.machine, named=measured)
    ceilings = measured if found else None
    return Account(plan, job.options.model, job.directory, machine, job.steps, between, ceilings=ceilings)


def _reporters(run: _Run, stack: ExitStack) -> Reporters:
    """Return the reporters for the screen only; they also show what the engine says while it opens."""
    reporters = Reporters()
    stack.callback(reporters.close)
    stack.enter_context(NearLimit(reporters))
    reporters.add(run.display.progress(run.job.steps))
    return reporters


def _files(run: _Run, reporters: Reporters, done_steps: int) -> MetricsFile:
    """Add the reporters that write files, each without what belongs to steps after `done_steps`."""
    directory, config = run.directory, run.job.options
    steps_per_epoch = run.job.rows.steps_per_epoch
    metrics = reporters.add(MetricsFile(directory.metrics, committed_steps=done_steps, steps_per_epoch=steps_per_epoch))
    reporters.add(
        TrainerStateFile(
            directory.trainer_state,
            metrics.records,
            evaluations=metrics.evaluations,
            clock=time.monotonic,
            **_of_run(run.job),
        )
    )
    # Memory in use is the same figure as the measured peaks.
    reporters.add(LanesFile(directory.path, committed_steps=done_steps, memory=lambda: {"host": anonymous_bytes()}))
    if "tensorboard" in config.report_to:
        reporters.add(TensorBoard(directory.tensorboard, committed_steps=done_steps))
    for kind in TRACKERS:
        if kind in config.report_to:
            name = config.run_name or directory.path.name
            reporters.add(Tracker(kind, name, config.to_json(), say=lambda words: run.display.say(f"note: {words}")))
    if "trace" in config.report_to:
        reporters.add(TraceFile(directory.trace(done_steps)))
    return metrics


def _interrupted(run: _Run, step: int, number: int) -> Interrupted:
    return Interrupted(
        f"{signal.Signals(number).name}: stopped after step {step} of {run.job.steps}, which is committed; "
        f"resume with: headrace resume {run.directory.path}",
        signal_number=number,
        step=step,
    )


def _of_run(job: Job) -> dict[str, Any]:
    """Return what the trainer's state is told of a run besides its records."""
    return of_run(job.options.eval_steps, job.steps, job.rows.steps_per_epoch, job.rows.spec.rows_per_step)
