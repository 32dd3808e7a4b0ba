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

from headrace.data import Batch
from headrace.data.batches.batches import Batches
from headrace.data.batches.open_data import note_of_epochs, step_tensors_of
from headrace.machine.host_memory import anonymous_bytes
from headrace.machine.meter import MemoryMeter
from headrace.machine.near_limit import NearLimit
from headrace.plan.search.serving import explain_serving, grouping_of
from headrace.plan.value.plan import Plan
from headrace.report import LanesFile, MetricsFile, Reporters, TensorBoard, TraceFile, TrainerStateFile
from headrace.report.completions import COMPLETIONS_NAME, CompletionsFile
from headrace.report.metrics import read_metrics
from headrace.report.trackers import TRACKERS, Tracker
from headrace.report.trainer_state import of_run, trainer_state
from headrace.runs.checkpoints import Checkpoints, CheckpointWriter
from headrace.runs.counted import for_people
from headrace.runs.evaluating import Evaluations, RunEvaluator
from headrace.runs.finish import keep_model, write_final
from headrace.runs.measuring import MachineOfRun
from headrace.runs.open_rows import open_rows
from headrace.runs.pausing import Pauses
from headrace.runs.prepare import check, prepare
from headrace.runs.protocols import Display, Engines, NoDisplay, RunningEngine, StateKind
from headrace.runs.references import References
from headrace.runs.replanning import PlanInUse
from headrace.runs.rollouts import Beside, Rollouts
from headrace.runs.signals import Interrupted, SaveRequest, StopRequest
from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import RunDirectoryError, StorageError
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
    """What one process works with. `total_steps` is the decided `config.max_steps`; `meter` and `saving` began with the
    process.
    """

    config: RunOptions
    directory: RunDirectory
    stream: Batches
    total_steps: int
    display: Display
    engines: Engines
    meter: MemoryMeter
    saving: SaveRequest
    checkpoints: Checkpoints

    @property
    def evaluations(self) -> Evaluations:
        """The run's evaluations."""
        return self.checkpoints.evaluations


def train(config: RunOptions, *, display: Display | None = None, engines: Engines | None = None) -> Finished:
    """Run `config` from the first step to the last and return where the model is.

    Raises:
        InputError: model, data, options or run directory cannot be used; nothing is left behind.
        PlanInfeasible: the budgets are too small.
        StorageError, StepFailed: the run broke, or a disk is full; `resume` goes on after the cause is removed.
        Interrupted: SIGINT or SIGTERM came; the run can be resumed.
    """
    with MemoryMeter() as meter, SaveRequest() as saving:
        checked, directory = check(config)
        engines = engines or _engines()
        resolved, stream = prepare(checked, directory, engines)
        run = _run(resolved, directory, stream, display, engines, meter, saving)
        if note := note_of_epochs(checked, stream):
            run.display.say(f"note: {note}")
        made = directory.write_config(resolved)
        return _begin(run, on_failure=lambda: directory.forget(made))


def resume(run_directory: str | Path, *, display: Display | None = None, engines: Engines | None = None) -> Finished:
    """Continue a run after its last committed step, whatever ended it, and return where the model is.

    Raises:
        RunDirectoryError: there is no run, it is finished, or another process works on it.
        CorruptData: the state does not have the checksums it was written with.
        DataError: the data is not that with which the run began.
        Interrupted: as for `train`.
    """
    with MemoryMeter() as meter, SaveRequest() as saving:
        return _resume(RunDirectory(Path(run_directory).absolute()), display, engines or _engines(), meter, saving)


def _resume(
    directory: RunDirectory, display: Display | None, engines: Engines, meter: MemoryMeter, saving: SaveRequest
) -> Finished:
    config = directory.read_config()
    kind = engines.state_of(directory.path)
    if kind is StateKind.NONE and directory.final.exists():
        engines.discard(directory.path)  # killed while it removed its state: nothing else would free the space
        raise RunDirectoryError(f"{directory.path}: the run is finished; its model is in {directory.final}")
    if kind is not StateKind.COMMITTED and (done := len(read_metrics(directory.metrics))):
        raise RunDirectoryError(
            f"{directory.path}: the run had taken {done} steps, but its state is gone (for example by headrace clean "
            "--unfinished); start a new run"
        )
    run = _run(config, directory, open_rows(config, resumed=True), display, engines, meter, saving)
    if kind is not StateKind.COMMITTED:
        engines.discard(directory.path)  # killed while the model was imported: there is nothing to resume
        return _begin(run)

    def tell(plan: Plan) -> None:
        if plan.serves:
            _tell_serving(run, plan)

    with ExitStack() as stack:
        reporters = _reporters(run, stack)
        engine = stack.enter_context(engines.resume(directory.path, sink=for_people(reporters, tell)))
        if engine.position is not None:
            run.stream.restore(engine.position["data"])
            if run.stream.by_earlier_rules:
                run.display.say(
                    "note: the run keeps the tokens that it began with; earlier rules chose which of them are trained"
                )
        account = _account(run, engine.plan) if engine.plan is not None and not engine.plan.serves else None
        words = f": {account.in_short(steps_left=run.total_steps - engine.step_index)}" if account else ""
        run.display.say(f"resuming {directory.path} after step {engine.step_index} of {run.total_steps}{words}")
        return _drive(run, engine, reporters, account)


def _begin(run: _Run, on_failure: Callable[[], None] | None = None) -> Finished:
    """Open a new engine and drive it. If it cannot be opened, `on_failure` undoes what was made before."""
    config = run.config
    told: list[Account] = []

    with ExitStack() as stack:
        reporters = _reporters(run, stack)
        machine = MachineOfRun(config, run.directory.path, total_steps=run.total_steps, sink=reporters)

        def tell(plan: Plan) -> None:
            if plan.serves:  # its workers forecast
                _tell_serving(run, plan)
                return
            told.append(_account(run, plan, machine.ceilings))
            told[0].tell_before(run.display)

        options = replace(config, output=run.directory.path, machine=machine.ceilings or config.machine)
        packed = run.stream.first_rows(run.total_steps)
        try:
            engine = run.engines.open(config.model, options, for_people(reporters, tell), measure=machine, packed=packed)
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
    plans = PlanInUse(account, run.config, engine, reporters, partial(_account, run, found=True))
    with run.directory.writing():
        metrics = _files(run, reporters, engine.step_index)

    def summary() -> str:
        """Write the figures of the whole run; return them in words."""
        told = _account(run, engine.plan) if engine.plan is not None and engine.plan.serves else plans.account
        if told is None:
            return ""
        return told.sum_up(metrics.records, metrics.evaluations, host_peak_bytes=run.meter.peak_bytes())

    started, taken = time.monotonic(), list[float]()
    with StopRequest() as stop, ExitStack() as closing:

        def heed() -> None:
            if stop.received is not None:
                raise _interrupted(run, engine.step_index, stop.received)

        run.engines.heed(heed)
        pauses = Pauses.of(run.config, run.directory.path, engine, lambda: stop.received is not None, reporters)
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
            engine.step_index < run.total_steps
            and stop.received is None
            and reporters.failure is None
            and not evaluator.plan.over(metrics.evaluations)
        ):
            if (batch := tensors(run.stream.next_batch())) is None:
                break
            result = engine.step(batch, position={"data": run.stream.state()})
            reporters(replace(result, step=engine.step_index, metrics={**result.metrics, **logged()}))
            taken.append(result.seconds)
            if stop.received is None and reporters.failure is None:
                plans.after_step(taken, steps_left=run.total_steps - engine.step_index)
                look_after_step()
                if engine.step_index < run.total_steps:
                    pauses.after_step(result)
        engine.flush()
        _say(run, "\n".join(run.stream.left_out))
        keeper.close()
        reporters.close()
        if reporters.failure is not None:
            raise run.directory.unwritable(reporters.failure) from reporters.failure
        if stop.received is not None:
            _say(run, summary())
            raise _interrupted(run, engine.step_index, stop.received)
    steps = engine.step_index
    if steps < run.total_steps:
        patience = run.config.early_stopping_patience
        run.display.say(f"stopped early: {patience} evaluations in a row had no lower loss than the best before them")
    words = summary()  # before the model, which is the last that may fail
    try:
        if note := write_final(engine, run.directory, run.checkpoints, metrics.records, metrics.evaluations):
            run.display.say(f"note: {note}")
        with suppress(StorageError):  # the figures before the model are there
            words = summary()  # writing the model also takes memory
    finally:
        _say(run, words)
    if not run.config.keep_state:
        engine.remove_state()
    run.display.say(f"done: {steps} steps, {format_seconds(time.monotonic() - started)}; model in {run.directory.final}")
    return Finished(run_directory=run.directory.path, final=run.directory.final, steps=steps)


def _makers(
    run: _Run, engine: RunningEngine, metrics: MetricsFile, heed: Callable[[], bool], closing: ExitStack
) -> tuple[Callable[[Batch], Any], Callable[[Batch], Any], Callable[[], Mapping[str, float]]]:
    """Return what makes tensors of a step's batch (None: the run is to stop), and of held-out rows, and figures of the step
    that are no loss's; `closing` ends it.
    """
    if (references := _references(run, engine, heed)) is not None:
        return references.beside, partial(references.beside, held_out=True), dict
    file = CompletionsFile(run.directory.path / COMPLETIONS_NAME, committed_steps=engine.step_index)
    beside = Beside(
        file,
        lambda: trainer_state(
            metrics.records, metrics.evaluations, **of_run(run.config, run.total_steps, run.stream.steps_per_epoch)
        ),
        run.display.say,
    )
    if (rollouts := Rollouts.of(run.config, run.stream, engine, run.directory.path, beside)) is not None:
        closing.callback(rollouts.close)
        return partial(rollouts.rows, heed=heed), step_tensors_of, lambda: rollouts.figures
    return step_tensors_of, step_tensors_of, dict


def _references(run: _Run, engine: RunningEngine, heed: Callable[[], bool]) -> References | None:
    """Return the log-probabilities of the reference, made before the first step; None if the loss takes none."""
    references = References.of(run.config, run.stream)
    if references is not None:
        started = time.monotonic()
        if made := references.make(engine, run.evaluations, heed):
            run.display.say(
                f"reference: {made} rows scored before the first step, {format_seconds(time.monotonic() - started)}"
            )
    return references


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
        lambda path: keep_model(engine, path, run.config),
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

    config = run.config if measured is None else replace(run.config, machine=measured)
    ceilings = measured if found else None
    return Account(plan, config, run.directory, run.total_steps, run.checkpoints.between_steps(), ceilings=ceilings)


def _run(
    config: RunOptions,
    directory: RunDirectory,
    stream: Batches,
    display: Display | None,
    engines: Engines,
    meter: MemoryMeter,
    saving: SaveRequest,
) -> _Run:
    if config.max_steps is None:
        raise RunDirectoryError(f"{directory.config}: max_steps is missing; restore the file as the run wrote it")
    display = display or NoDisplay()
    for notice in stream.notices:
        display.say(f"note: {notice}")
    checkpoints = Checkpoints(config, Evaluations(config, stream, config.max_steps))
    return _Run(config, directory, stream, config.max_steps, display, engines, meter, saving, checkpoints)


def _reporters(run: _Run, stack: ExitStack) -> Reporters:
    """Return the reporters for the screen only; they also show what the engine says while it opens."""
    reporters = Reporters()
    stack.callback(reporters.close)
    stack.enter_context(NearLimit(reporters))
    reporters.add(run.display.progress(run.total_steps))
    return reporters


def _files(run: _Run, reporters: Reporters, done_steps: int) -> MetricsFile:
    """Add the reporters that write files, each without what belongs to steps after `done_steps`."""
    directory, config = run.directory, run.config
    steps_per_epoch = run.stream.steps_per_epoch
    metrics = reporters.add(MetricsFile(directory.metrics, committed_steps=done_steps, steps_per_epoch=steps_per_epoch))
    reporters.add(
        TrainerStateFile(
            directory.trainer_state,
            metrics.records,
            evaluations=metrics.evaluations,
            clock=time.monotonic,
            **of_run(run.config, run.total_steps, run.stream.steps_per_epoch),
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
        f"{signal.Signals(number).name}: stopped after step {step} of {run.total_steps}, which is committed; "
        f"resume with: headrace resume {run.directory.path}",
        signal_number=number,
        step=step,
    )


def _engines() -> Engines:
    # Late, because it imports the model library and the kernels' compiler; bad options should be refused before that.
    from headrace.runs.engines import headrace_engines

    return headrace_engines()
