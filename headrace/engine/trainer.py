"""The engine of training: it runs steps, evaluates, exports. `beginning` builds the parts that it needs."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch

from headrace.ask.planner import WaysToPlan
from headrace.engine.beginning import Measure, Run, WholeRun, begin_run, first_record, resume_run
from headrace.engine.replanning import MOST_REPLANS, REPLANS_LEFT, LaneTotals, Replanning
from headrace.engine.saving import Saver
from headrace.engine.scoring import Scoring, loss_of
from headrace.engine.seams import Seams
from headrace.flow.run.execute import interpreter_of
from headrace.flow.step.settle import proposed_in
from headrace.flow.step.step_batch import StepBatch
from headrace.flow.step.step_state import StepState, Verdict
from headrace.flow.step.steps import ProgramBuilders, Steps
from headrace.flow.weights.traffic import Traffic
from headrace.machine.host_memory import HeapGuard, keep_freed_memory
from headrace.machine.meter import MemoryMeter, measured_peaks
from headrace.plan.search.given import load_plan
from headrace.plan.search.problem import Problem
from headrace.plan.value.plan import Plan
from headrace.terms.closing import Closing
from headrace.terms.events import Event, Sink, StepResult
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.options import Options
from headrace.terms.saving import Saved, Saving
from headrace.update import HitRate, LossScale


class Engine(Scoring, Replanning, Closing):
    """Fine-tunes one model out of core. Use as a context manager, or `close` it.

    `step` runs one optimizer step over a whole batch. Updates of the last blocks, and the commit, may still be under way
    when it returns; `flush` waits for them. A step whose gradient is not finite changes nothing and says so.
    """

    _search: Callable[[Problem, Ceilings | None], Plan] | None = None
    _may_learn_rows = True
    _schedule = ProgramBuilders()
    _kind_of_steps = Steps

    def __init__(self, run: Run) -> None:
        """Step with the parts of `run`, and close them at the end. `open` and `resume` make them."""
        self._run = run
        self.options, self.plan, self.store = run.options, run.plan, run.store
        self._rates = run.options.schedule
        self._subject, self._planner, self._emit, self._closers = run.subject, run.planner, run.sink, run.closers
        self.chain, self.machine, self._token_loss = run.subject.chain, run.subject.machine, run.subject.seams.token_loss
        self._heap: HeapGuard | None = None
        self._saver = Saver(run.subject, run.store, lambda: self.provenance)
        self._read_record()
        self._lanes = None if run.sink is _unheard else LaneTotals(run.sink)
        self._meter = MemoryMeter()
        self._closers.callback(self._meter.close)
        self._steps: Steps | None = None
        self._hits, self.export_notes = HitRate(), run.subject.export_notes
        # What an import or a verification moved before this belongs to no step.
        self._traffic = Traffic(self.store, run.rows, run.subject.embedding, run.subject.block_tables)
        self._closed = False

    @classmethod
    def open(
        cls,
        model: str | Path,
        options: Options | None = None,
        sink: Sink | None = None,
        *,
        plan: Plan | None = None,
        adjust_plan: Callable[[Plan], Plan] | None = None,
        measure: Measure | None = None,
        whole: WholeRun | None = None,
        seams: Seams | None = None,
    ) -> Self:
        """Import a Hugging Face model directory into a new store and return the engine that trains it.

        `options` are `headrace.Options`; events go to `sink`. Without `tokens_per_step` the plan is made for the first batch.
        The run directory `output` holds the run's records; the default is a temporary folder, removed by `close`. The `ssd`
        directories hold the state; the default is the run directory. Only their drives count in the plan.
        `plan` replaces the plan that `options` name. `adjust_plan` may change the plan before anything is built, for
        experiments with other placements. `measure` is asked for the machine's figures if the options have none. It gets the
        plan that is made without them, and another one is made with what it returns. `whole` is what is known of a whole run.
        `seams` are the other exchangeable parts: how gradients travel, how frozen weights lie on the drives, and where far
        units live.

        Raises:
            InputError: the model, a directory, an option or `plan` cannot be used; nothing has been allocated or written.
            DiskFull: there is no space for the state, or for the finished model; nothing has been written.
            PlanInfeasible: the budget is too small; the message says what would help.
        """
        options = options or Options()
        cls._check(options)
        if plan is None and options.plan is not None:
            plan = load_plan(Path(options.plan))
        ways = WaysToPlan(given=plan, search=cls._search, adjust=adjust_plan, may_learn_rows=cls._may_learn_rows)
        return cls(begin_run(Path(model).resolve(), options, sink or _unheard, ways, measure=measure, whole=whole, seams=seams))

    @classmethod
    def resume(
        cls,
        run_directory: str | Path,
        *,
        sink: Sink | None = None,
        verify: bool = True,
        check: Callable[[Options], None] = lambda options: None,
        seams: Seams | None = None,
    ) -> Self:
        """Return the engine of an existing run, at its last committed step. `verify` reads and checks the whole state first.

        `check` is called first with the options of the run, and may refuse it. `seams` must be those that the run was opened
        with.

        Raises:
            RunDirectoryError: there is no run, it has another format version, another process uses it, or it has other seams.
            CorruptData: a state record does not have the checksum it was written with (unit, file, offset, both checksums).
        """

        def checked(options: Options) -> None:
            cls._check(options)
            check(options)

        ways = WaysToPlan(search=cls._search)
        return cls(resume_run(Path(run_directory), sink or _unheard, ways, verify=verify, check=checked, seams=seams))

    @classmethod
    def _check(cls, options: Options) -> None:
        """Refuse options that this kind of engine does not have."""

    def _read_record(self) -> None:
        record = self.store.record
        self.num_steps = int(record["num_steps"])
        self._updates = tuple(int(count) for count in record["updates"])
        self.position: Any = record.get("position")
        if (site := self._subject.seams.site) is not None:
            site.go_back(self.num_steps)
        self._replans_left = int(record.get(REPLANS_LEFT, MOST_REPLANS))
        scale = record.get("loss_scale")
        self._loss_scale = LossScale.from_json(scale) if scale else None

    def _ready(self, sequences: int, length: int) -> Steps:
        """Return what runs a batch of this shape, with a larger plan than before if the batch needs one."""
        plan = self.plan
        if (
            plan is None
            or length > plan.batch.sequence_length
            or sequences > self._rows(plan, sequences, length) * plan.batch.num_micro_batches
        ):
            self.rest()
            longest = max(length, plan.batch.sequence_length if plan else 0)
            plan = self.plan = self._planner.plan(sequences * longest, longest, state=self.store.manifest)
        if self._steps is None:
            self._steps = self._build_steps(plan)
        return self._steps

    def _rows(self, plan: Plan, sequences: int, length: int) -> int:
        """Return the rows of a micro-batch of this shape: more rows at once, if they are more and shorter than planned."""
        rows = plan.batch.micro_batch_sequences
        # Rows are padded for compiled blocks.
        if sequences <= rows * plan.batch.num_micro_batches or self.options.compile_blocks:
            return rows
        return rows * plan.batch.sequence_length // length

    def _build_steps(self, plan: Plan) -> Steps:
        if not plan.separate_device:
            workspace = plan.results.peak_bytes["host"].get("workspace", 0)
            keep = plan.freed_memory == "kept"
            self._heap = HeapGuard(plan.peak("host"), workspace, keep=keep, resident=self._meter.bytes_now)
            self._meter.tell(self._heap.look)
        parts = self._run.parts(plan)
        interpreter = interpreter_of(self.options.interpreter, self.machine, self._lanes)
        return self._kind_of_steps(parts, interpreter, self._hits, self._schedule)

    def _drop_buffers(self) -> None:
        if self._steps is not None:
            self._steps.close()
            self._hits = self._steps.hits
        self._steps = None
        self.machine.release_host_buffers()
        keep_freed_memory(False)

    def step(
        self, batch: Mapping[str, torch.Tensor], *, position: Any = None, learning_rate: float | None = None
    ) -> StepResult:
        """Run one optimizer step over a whole batch and return its loss, gradient norm, tokens and seconds.

        `batch` has integer tensors of shape (sequences, length): `input_ids`, `labels` (-100: not trained), and optionally
        `attention_mask`, `position_ids` and `token_mask`. `token_mask` is 0 for tokens that only fill a packed row; auxiliary
        losses leave them out. The loss is the mean over the step's trained tokens, whatever the split into micro-batches. A
        loss of the whole step gets all of `batch`, which may then have other tensors, too.
        `position` is stored with the step (the data position; see `Engine.position`). A `learning_rate` stands in for that of
        the options' schedule.

        Raises:
            DataError: shapes do not agree, a token is not in the vocabulary, or none is trained.
            StepFailed: a lane failed (its cause is chained). The last committed step is untouched; `resume` continues from it.
        """
        started, cpu_batch = time.perf_counter(), self._checked(batch)
        shape = cpu_batch["input_ids"].shape
        steps = self._ready(*shape)
        rows = self._rows(steps.parts.plan, *shape)
        self._meter.reset()
        data = self._cut(cpu_batch, rows, steps.parts.plan)
        mine, first = self._share_of(data)
        self.plan = steps.follow_hit_rate()
        verdict = self._verdict(position, learning_rate)

        def state_of(pending: Verdict | None) -> StepState:
            return StepState(steps.parts, mine, verdict, pending, first_micro=first)

        state = steps.run(len(mine.micro_batches), verdict, state_of)
        self._add_losses(state)
        self._move_on(verdict)
        self._settle(verdict)
        moved = self._traffic.moved()
        result = StepResult(
            step=verdict.step,
            loss=loss_of(state),
            grad_norm=verdict.grad_norm,
            learning_rate=verdict.learning_rate,
            tokens=batch["input_ids"].numel(),
            trained_tokens=data.trained_tokens,
            seconds=time.perf_counter() - started,
            skipped=verdict.skipped,
            loss_scale=verdict.loss_scale.scale if verdict.loss_scale else None,
            update_policy=self.plan.updates.policy,
            redone=verdict.redone,
            bytes_read=moved.bytes_read,
            bytes_written=moved.bytes_written,
            io_cpu_seconds=moved.io_cpu_seconds,
            peak_bytes=measured_peaks(self._meter, self.machine, self.plan.peak("device")),
            estimation_errors=verdict.estimation_errors,
            metrics={name: float(value) for name, value in state.outcome.metrics.items()} if state.outcome else {},
        )
        if self._heap is not None:
            self._heap.after_step(result.peak_bytes["host"])
        self._emit(result)
        return result

    def _score(self, batch: dict[str, torch.Tensor]) -> tuple[StepBatch, StepState]:
        """See `Scoring`."""
        steps = self._ready(*(shape := batch["input_ids"].shape))
        data = self._cut(batch, self._rows(steps.parts.plan, *shape), steps.parts.plan)
        mine, first = self._share_of(data)
        state = steps.score(mine, self._verdict(self.position), first)
        self._add_losses(state)
        self._traffic.moved()  # belongs to no step
        return data, state

    def _share_of(self, data: StepBatch) -> tuple[StepBatch, int]:
        """Return the micro-batches of a step that are computed here, and the number of the first."""
        return data, 0

    def _add_losses(self, state: StepState) -> None:
        """Add the losses of micro-batches that are computed elsewhere."""

    def _verdict(self, position: Any, learning_rate: float | None = None) -> Verdict:
        plan = self.plan
        assert plan is not None
        if self.options.compute_dtype == "float16" and self._loss_scale is None:
            self._loss_scale = LossScale()
        scale = self._loss_scale.scale if self._loss_scale else 1.0
        return Verdict(
            step=self.num_steps,
            updates=self._updates,
            learning_rate=self._subject.optimizer.lr * self._rates.factor(self.num_steps)
            if learning_rate is None
            else learning_rate,
            gradient_scale=1.0 / scale,
            loss_scale=self._loss_scale,
            max_grad_norm=self.options.max_grad_norm,
            durable=(self.num_steps + 1) % plan.updates.checkpoint_every == 0,
            record=lambda verdict: self._record(verdict, position),
        )

    def _record(self, verdict: Verdict, position: Any) -> dict[str, Any]:
        """Return the payload of a commit: the position of the run after the step of `verdict`."""
        scale = self._after(verdict)
        return {
            **first_record(self.options.to_record(), self.plan, self._subject),
            "num_steps": verdict.step + 1,
            "updates": verdict.updates_after,
            "position": position,
            "loss_scale": scale.to_json() if scale else None,
            **({} if self._replans_left == MOST_REPLANS else {REPLANS_LEFT: self._replans_left}),
            **({} if verdict.skipped else proposed_in(verdict)),
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
            self.rest()  # the contents of buffers are out of date
            self._subject.settle(self.store)

    def rest(self) -> None:
        """Finish everything under way, and free the buffers of steps. The next step makes and fills them again."""
        self.flush()
        self._drop_buffers()

    def flush(self) -> None:
        """Finish everything under way and make the newest step durable."""
        if self._steps is not None:
            self._steps.flush()
            moved = self._traffic.moved()
            if any((*moved.bytes_read.values(), *moved.bytes_written.values())):
                self._emit(moved)

    @property
    def step_index(self) -> int:
        """Number of steps done."""
        return self.num_steps

    @property
    def provenance(self) -> dict[str, Any]:
        """Where the newest weights come from: the run, and the number of its steps."""
        return {"run_id": self.store.manifest.run_id, "steps": self.num_steps}

    def save_pretrained(self, out_dir: str | Path, notes: Mapping[str, str] = MappingProxyType({})) -> None:
        """Write the newest weights as an ordinary Hugging Face directory, in constant memory. A run with adapters writes PEFT's
        files (`engine.merging` merges them).

        Tensors have the names, layout and dtype of the opened checkpoint. Tokenizer files are copied. `headrace.json` has the
        `provenance`; `notes` are the texts of further files, by name. The buffers of steps are freed first. The next step
        allocates and fills them again.
        """
        self.rest()  # the plan has no room for its buffers and an export's at once
        self._saver.write(Path(out_dir), notes)
        self._traffic.moved()  # what an export reads belongs to no step

    def begin_saving(self, out_dir: str | Path, notes: Mapping[str, str] = MappingProxyType({})) -> Saving:
        """Begin to do as `save_pretrained` does. Steps may go on meanwhile; the next commit waits for it. Where the plan has no
        memory for both, the directory is whole on return.
        """
        if self.plan is not None and self.plan.results.saves_beside_steps:
            self.flush()
            return self._saver.begin(Path(out_dir), notes)
        self.save_pretrained(out_dir, notes)
        return Saved()

    def heed(self, check: Callable[[], None]) -> None:
        """Call `check` while a write waits for space; what it raises ends the wait, and the step fails."""
        self.store.heed(check)

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
                self._saver.settle()
        finally:
            self._shut_down()
            self._closers.close()

    def _shut_down(self) -> None:
        self._closed = True
        self._saver.close()
        self._drop_buffers()


def _unheard(event: Event) -> None:
    """The sink of an engine that was given none."""
