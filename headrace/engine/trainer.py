"""The engine: builds the parts, owns them, and offers steps, resume and export. The only place where parts meet."""

import contextlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from headrace.answers.planner import RunPlanner
from headrace.engine.lent_base import as_begun, lie_together
from headrace.engine.seams import Seams, seams_of
from headrace.engine.subject import Subject, tune
from headrace.files import Beside, file_systems
from headrace.flow.buffers import Buffers
from headrace.flow.execute import interpreter_of
from headrace.flow.settle import proposed_in
from headrace.flow.step_batch import StepBatch, check_apart, checked_batch, filled_up, step_batch
from headrace.flow.step_state import Parts, StepState, Verdict
from headrace.flow.steps import Schedule, Steps
from headrace.flow.traffic import Traffic
from headrace.flow.update import device_updater
from headrace.machine.host_memory import HeapGuard, keep_freed_memory
from headrace.machine.meter import MemoryMeter
from headrace.machine.protocol import Machine
from headrace.plan.buffer_sizes import scratch_bytes
from headrace.plan.given import load_plan
from headrace.plan.machine_profiles import load_profile
from headrace.plan.placement import Problem
from headrace.plan.plan import Plan
from headrace.store import StateStore, make_run_directory
from headrace.terms.ceilings import Ceilings
from headrace.terms.cuts import pieces_of
from headrace.terms.errors import RunDirectoryError
from headrace.terms.events import Evaluation, Event, Notice, Planned, Sink, StepResult
from headrace.terms.options import Options
from headrace.terms.provenance import PROVENANCE_NAME
from headrace.update import HitRate, LossScale


class Engine:
    """Fine-tunes one model out of core. Use as a context manager, or `close` it.

    `step` runs one optimizer step over a whole batch. Updates of the last blocks, and the commit, may still be under way
    when it returns; `flush` waits for them. A step whose gradient is not finite changes nothing and says so.
    """

    _search: Callable[[Problem, Ceilings | None], Plan] | None = None
    _schedule = Schedule()

    def __init__(
        self,
        model: Path,
        options: Options,
        store_of: Callable[["Engine"], StateStore],
        sink: Sink | None,
        adjust_plan: Callable[[Plan], Plan] | None = None,
        given_plan: Plan | None = None,
        seams: Seams | None = None,
        lends: Callable[[Sequence[Path]], bool] = lambda files: False,
    ) -> None:
        self.options = options
        self._user_sink = sink
        self._closers = contextlib.ExitStack()
        keep_freed_memory(False)
        try:
            self._heap: HeapGuard | None = None
            self._subject = subject = Subject(model, options, seams or seams_of(options), lends)
            self._closers.callback(subject.close)
            self.chain, self.machine = subject.chain, subject.machine
            self._planner = RunPlanner(
                options,
                self.chain,
                self.machine,
                subject.weights,
                forms=subject.forms,
                rule=subject.rule,
                own_rule=subject.own_rule,
                cores=subject.cores,
                warm_up=subject.warm_up,
                given=given_plan,
                adjust=adjust_plan,
                search=self._search,
            )
            self.plan: Plan | None = None  # a resumed run has its plan in the record
            self.store = store_of(self)
            self._closers.callback(self.store.close)
            subject.check_layouts(self.store)
            subject.settle(self.store)
            self._read_record()
            self._meter = MemoryMeter()
            self._closers.callback(self._meter.close)
            self._steps: Steps | None = None
            self._hits = HitRate()
            self._traffic = Traffic(self.store)  # what an import or a verification moved before this belongs to no step
            self._closed = False
        except BaseException:
            self._closers.close()
            raise

    # -- opening ----------------------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        model: str | Path,
        options: Options | None = None,
        sink: Sink | None = None,
        *,
        plan: Plan | None = None,
        adjust_plan: Callable[[Plan], Plan] | None = None,
        final: Path | None = None,
        measure: Callable[[Plan, Machine], Ceilings | None] | None = None,
        seams: Seams | None = None,
    ) -> "Engine":
        """Import a Hugging Face model directory into a new store and return the engine that trains it.

        `options` say everything else (`headrace.Options`); events go to `sink`. The run directory `output` holds the run's
        records (default: a temporary folder, removed by `close`); the `ssd` directories hold the state (default: the run
        directory). Without `tokens_per_step` the plan is made for the first batch. Of the machine's drives only those of the
        SSD directories count. `plan` replaces the one that `options` name. `adjust_plan` may change the plan before anything is
        built, for experiments with placements that the planner would not choose. `final` is where the model will be written at
        the end, beside the state: without space for both, no run begins. `measure` is asked for the machine's figures if the
        options have none; it gets the plan that is made without them, and another one is made with what it returns. `seams` are
        the other exchangeable parts: how gradients travel, how frozen weights lie on the drives, where far units live.

        Raises:
            InputError: the model, a directory, an option or `plan` cannot be used; nothing has been allocated or written.
            DiskFull: there is no space for the state, or for `final`; nothing has been written.
            PlanInfeasible: the budget is too small; the message says what would help.
        """
        options = options or Options()
        ssd = options.budget.ssd
        if plan is None and options.plan is not None:
            plan = load_plan(Path(options.plan))
        machine = load_profile(options.machine) if isinstance(options.machine, str) else options.machine
        if machine is not None:
            options = replace(options, machine=machine.of_directories(file_systems(ssd) or (0,)))
        _ = options.schedule  # refuses a schedule without an end
        temporary = tempfile.TemporaryDirectory(prefix="headrace-") if options.output is None else None
        directory = Path(temporary.name if options.output is None and temporary else options.output or "")
        try:
            engine = cls(
                Path(model).resolve(),
                options,
                lambda engine: engine._import(directory, ssd, final, measure if machine is None else None),
                sink,
                adjust_plan,
                plan,
                seams,
                lambda files: lie_together(files, ssd or (directory,)),
            )
        except BaseException:
            if temporary is not None:
                temporary.cleanup()
            raise
        if temporary is not None:
            engine._closers.callback(temporary.cleanup)
            engine._closers.callback(engine.store.remove)
        return engine

    @classmethod
    def resume(
        cls,
        run_directory: str | Path,
        *,
        sink: Sink | None = None,
        verify: bool = True,
        check: Callable[[Options], None] = lambda options: None,
        seams: Seams | None = None,
    ) -> "Engine":
        """Return the engine of an existing run, at its last committed step. `verify` reads and checks the whole state first.

        `check` is called before that with the options of the run, and may refuse it. `seams` must be those with which it was
        opened.

        Raises:
            RunDirectoryError: there is no run, it has another format version, another process uses it, or it has other seams.
            CorruptData: a state record does not have the checksum it was written with (unit, file, offset, both checksums).
        """
        store = StateStore.open(Path(run_directory), sink=sink or (lambda event: None))
        try:
            recorded = store.record.get("options")
            if not isinstance(recorded, dict):
                raise RunDirectoryError(f"{run_directory}: its newest record holds no options; it cannot be resumed")
            options = Options.from_record(recorded)
            check(options)
            seams = seams or seams_of(options, store.manifest.identity.get("wire"))
            seams.check(store)
            tune(store, options)
            if verify:
                store.verify()
            model, lends = Path(str(store.manifest.identity["model"])), partial(as_begun, store.manifest.identity)
            return cls(model, options, lambda own: own._subject.use_lent(store, own._emit), sink, seams=seams, lends=lends)
        except BaseException:
            store.close()
            raise

    def _import(
        self,
        directory: Path,
        ssd: tuple[Path, ...],
        final: Path | None,
        measure: Callable[[Plan, Machine], Ceilings | None] | None,
    ) -> StateStore:
        """Return a new store with the model in it, after planning for it. If it fails, nothing is left behind."""
        directories, options = ssd or (directory,), self.options
        beside = Beside("the finished model", final, self._subject.finished_bytes) if final else None
        if options.tokens_per_step is not None:
            step = options.tokens_per_step, options.sequence_length or options.tokens_per_step
            self._subject.choose_wire(lambda forms: self._planner.suits(forms, *step, state=directories, beside=beside))
            self.plan = self._planner.plan(*step, state=directories, beside=beside)
            if measure is not None and (found := measure(self.plan, self.machine)) is not None:
                self._planner.use(found := found.of_directories(file_systems(directories)))
                self.plan = self._planner.plan(*step, state=directories, beside=beside)
                self.options = options = replace(options, machine=found)
        with contextlib.ExitStack() as undo:
            make_run_directory(directory, undo)
            store = self._subject.create_store(directory, directories, beside, self.plan, self._emit)
            undo.callback(store.remove)
            tune(store, options)
            if self.plan is not None:
                self._emit(Planned(plan=self.plan))
            if warning := options.schedule.warning:
                self._emit(Notice(text=warning))
            self._emit(Notice(text=self._subject.importing, level="info"))
            self._subject.import_into(store, self._record(None))
            undo.pop_all()
        return store

    def _read_record(self) -> None:
        record = self.store.record
        self.num_steps = int(record["num_steps"])
        self._updates = tuple(int(count) for count in record["updates"])
        self.position: Any = record.get("position")
        if (site := self._subject.seams.site) is not None:
            site.go_back(self.num_steps)
        scale = record.get("loss_scale")
        self._loss_scale = LossScale.from_json(scale) if scale else None
        if record.get("plan") and self.plan is None:
            self.plan = self._planner.plan_here(Plan.from_json(record["plan"]), lambda text: self._emit(Notice(text=text)))

    # -- planning ---------------------------------------------------------------------------------------------------

    def _ready(self, sequences: int, length: int) -> Steps:
        """Return what runs a batch of this shape, with a larger plan than before if the batch needs one."""
        plan = self.plan
        if (
            plan is None
            or length > plan.sequence_length
            or sequences > self._rows(plan, sequences, length) * plan.num_micro_batches
        ):
            self.flush()
            self._drop_buffers()
            longest = max(length, plan.sequence_length if plan else 0)
            plan = self.plan = self._planner.plan(sequences * longest, longest, state=self.store.manifest)
        if self._steps is None:
            self._steps = self._build_steps(plan)
        return self._steps

    def _rows(self, plan: Plan, sequences: int, length: int) -> int:
        """Return the rows of a micro-batch of this shape: more rows at once, if they are more and shorter than planned."""
        rows = plan.micro_batch_sequences
        if sequences <= rows * plan.num_micro_batches or self.options.compile_blocks:  # rows are padded for compiled blocks
            return rows
        return rows * plan.sequence_length // length

    def _build_steps(self, plan: Plan) -> Steps:
        self.store.grow_scratch(scratch_bytes(plan))
        subject = self._subject
        subject.use_threads(plan)
        workspace = plan.results.peak_bytes["host"].get("workspace", 0)
        keep = plan.freed_memory == "kept"
        if not plan.separate_device:
            self._heap = HeapGuard(plan.peak("host"), workspace, keep=keep)
            self._meter.tell(self._heap.look)
        parts = Parts(
            plan=plan,
            chain=self.chain,
            machine=self.machine,
            buffers=Buffers(plan, self.machine),
            store=self.store,
            updater=subject.updater,
            own_updater=subject.own_updater,
            forms=subject.forms,
            wire=subject.seams.wire,
            site=subject.seams.site,
            maker=subject.maker,
            seed=self.options.seed,
            sink=self._emit,
            pieces=[pieces_of(form.trained, plan.rule) if form.trained else () for form in subject.forms],
            device_updater=device_updater(plan, self.machine, subject.updater.rule),
            workers=subject.seams.workers,
        )
        return Steps(parts, interpreter_of(self.options.interpreter, self.machine, self._user_sink), self._hits, self._schedule)

    def _drop_buffers(self) -> None:
        if self._steps is not None:
            self._steps.close()
            self._hits = self._steps.hits
        self._steps = None
        self.machine.release_host_buffers()
        keep_freed_memory(False)

    # -- stepping ---------------------------------------------------------------------------------------------------

    def step(self, batch: Mapping[str, torch.Tensor], *, position: Any = None) -> StepResult:
        """Run one optimizer step over a whole batch and return its loss, gradient norm, tokens and seconds.

        `batch`: `input_ids`, `labels` (-100: not trained), optional `attention_mask`, `position_ids` and `token_mask` (0 for
        what only fills a packed row: auxiliary losses leave it out), integer tensors of (sequences, length). The loss is the
        mean over the step's trained tokens, whatever the split into micro-batches.
        `position` is stored with the step (the data position; see `Engine.position`).

        Raises:
            DataError: shapes do not agree, a token is not in the vocabulary, or none is trained.
            StepFailed: a lane failed (its cause is chained); the last committed step is untouched, `resume` goes on from it.
        """
        started, cpu_batch = time.perf_counter(), checked_batch(batch, self.chain.vocabulary)
        check_apart(cpu_batch, self.chain)
        shape = cpu_batch["input_ids"].shape
        steps = self._ready(*shape)
        rows = self._rows(steps.parts.plan, *shape)
        if self.options.compile_blocks:  # one length is one graph
            cpu_batch = filled_up(cpu_batch, steps.parts.plan.sequence_length, needs_mask=self.chain.collects_asides)
        self._meter.reset()
        data = step_batch(cpu_batch, rows, self.machine.device)
        self.plan = steps.follow_hit_rate()
        verdict = self._verdict(position)

        def state_of(pending: Verdict | None) -> StepState:
            return StepState(steps.parts, data, verdict, pending)

        state = steps.run(len(data.micro_batches), verdict, state_of)
        self._move_on(verdict)
        self._settle(verdict)
        loss = float(state.loss_sum) / data.trained_tokens if state.loss_sum is not None else math.nan
        if state.aside_loss is not None:
            loss += float(state.aside_loss)
        moved = self._traffic.moved()
        result = StepResult(
            step=verdict.step,
            loss=loss,
            grad_norm=verdict.grad_norm,
            learning_rate=verdict.learning_rate,
            tokens=batch["input_ids"].numel(),
            trained_tokens=data.trained_tokens,
            seconds=time.perf_counter() - started,
            skipped=verdict.skipped,
            loss_scale=verdict.loss_scale.scale if verdict.loss_scale else None,
            update_policy=self.plan.update_policy,
            redone=verdict.redone,
            bytes_read=moved.bytes_read,
            bytes_written=moved.bytes_written,
            io_cpu_seconds=moved.io_cpu_seconds,
            peak_bytes=self._peak_bytes(self.plan),
            estimation_errors=verdict.estimation_errors,
        )
        if self._heap is not None:
            self._heap.after_step(result.peak_bytes["host"])
        self._emit(result)
        return result

    def _peak_bytes(self, plan: Plan) -> dict[str, int]:
        """Return the measured peaks. For a device tier inside host memory, its planned bytes are subtracted from the host's."""
        host = self._meter.peak_bytes()
        if self.machine.device.type == "cuda":
            return {"device": self.machine.device_peak_bytes(), "host": host}
        return {"host": host - plan.peak("device")} if plan.separate_device else {"host": host}

    def _verdict(self, position: Any) -> Verdict:
        plan = self.plan
        assert plan is not None
        if self.options.compute_dtype == "float16" and self._loss_scale is None:
            self._loss_scale = LossScale()
        scale = self._loss_scale.scale if self._loss_scale else 1.0
        return Verdict(
            step=self.num_steps,
            updates=self._updates,
            learning_rate=self._subject.optimizer.lr * self.options.schedule.factor(self.num_steps),
            gradient_scale=1.0 / scale,
            loss_scale=self._loss_scale,
            max_grad_norm=self.options.max_grad_norm,
            durable=(self.num_steps + 1) % plan.checkpoint_every == 0,
            record=lambda verdict: self._record(verdict, position),
        )

    def _record(self, verdict: Verdict | None, position: Any = None) -> dict[str, Any]:
        """Return the payload of a commit: the position of the run after the step of `verdict` (None: after the import)."""
        scale = self._after(verdict) if verdict else None
        return {
            "options": self.options.to_record(),
            "plan": self.plan.to_json() if self.plan else None,
            "num_steps": verdict.step + 1 if verdict else 0,
            "updates": verdict.updates_after if verdict else (0,) * len(self.chain.layouts),
            "position": position,
            "loss_scale": scale.to_json() if scale else None,
            **(proposed_in(verdict) if verdict and not verdict.skipped else {}),
        }

    @staticmethod
    def _after(verdict: Verdict) -> LossScale | None:
        return verdict.loss_scale.after(verdict.skipped is None) if verdict.loss_scale else None

    def _move_on(self, verdict: Verdict) -> None:
        self.num_steps += 1
        self._updates = verdict.updates_after
        self._loss_scale = self._after(verdict)

    def _settle(self, verdict: Verdict) -> None:
        if self._subject.settles(verdict):
            self.flush()
            self._drop_buffers()  # their contents are out of date
            self._subject.settle(self.store)

    def flush(self) -> None:
        """Finish everything under way and make the newest step durable."""
        if self._steps is not None:
            self._steps.flush()
            moved = self._traffic.moved()
            if any((*moved.bytes_read.values(), *moved.bytes_written.values())):
                self._emit(moved)

    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> Evaluation:
        """Return the mean loss of a batch, given as to `step`, under the newest weights; nothing is changed.

        The newest step is made durable first. Auxiliary losses are left out.

        Raises:
            DataError: as `step`.
            StepFailed: a lane failed; the last committed step is untouched.
        """
        data, state = self._score(checked_batch(batch, self.chain.vocabulary))
        assert state.loss_sum is not None, "something is trained in a checked batch"
        return Evaluation(loss=float(state.loss_sum) / data.trained_tokens, tokens=data.trained_tokens)

    def next_logits(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits (sequences, vocabulary) of the token after each row, float32 on the host, under the newest weights.

        `batch` is as for `step`, without `labels`; shorter rows are padded on the left, and masked.

        Raises:
            DataError: as `step`.
            StepFailed: a lane failed; the last committed step is untouched.
        """
        _, state = self._score(checked_batch(batch, self.chain.vocabulary, labelled=False))
        return torch.cat([state.logits[micro].cpu() for micro in sorted(state.logits)])

    def _score(self, batch: dict[str, torch.Tensor]) -> tuple[StepBatch, StepState]:
        check_apart(batch, self.chain)
        steps = self._ready(*(shape := batch["input_ids"].shape))
        data = step_batch(batch, self._rows(steps.parts.plan, *shape), self.machine.device)
        state = steps.score(data, self._verdict(self.position))
        self._traffic.moved()  # belongs to no step
        return data, state

    # -- results ----------------------------------------------------------------------------------------------------

    @property
    def step_index(self) -> int:
        """Number of steps done."""
        return self.num_steps

    @property
    def provenance(self) -> dict[str, Any]:
        """Which weights the newest ones are: the run, and the number of its steps."""
        return {"run_id": self.store.manifest.run_id, "steps": self.num_steps}

    def save_pretrained(self, out_dir: str | Path) -> None:
        """Write the newest weights as an ordinary Hugging Face directory, in constant memory; a run of adapters writes them in
        peft's files (`engine.merging` merges them).

        Tensors have the names, layout and dtype of the checkpoint that was opened; tokenizer files come along. `headrace.json`
        has the `provenance`. The buffers of steps are freed before; the next step makes them again, and reads what lives in
        them.
        """
        self.flush()
        self._drop_buffers()  # the plan has no room for these and an export's buffers at once
        self._subject.export(self.store, Path(out_dir), {PROVENANCE_NAME: json.dumps(self.provenance) + "\n"})
        self._traffic.moved()  # what an export reads belongs to no step

    # -- ends -------------------------------------------------------------------------------------------------------

    def remove_state(self) -> None:
        """Close the engine and delete its files on the SSDs. Exported models stay."""
        self._shut_down()
        self.store.remove()
        self._closers.close()

    def close(self) -> None:
        """Make the newest step durable and end all threads; after a failed step, only end them."""
        if self._closed:
            return
        try:
            if self._steps is not None and not self._steps.failed:
                self.flush()
        finally:
            self._shut_down()
            self._closers.close()

    def _shut_down(self) -> None:
        self._closed = True
        self._drop_buffers()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _emit(self, event: Event) -> None:
        if self._user_sink is not None:
            self._user_sink(event)
