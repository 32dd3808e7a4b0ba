"""The engine of a rank: it steps with a share of each batch, and holds a share of each unit (ZeRO-3, on SSDs).

Rank 0 is driven as any engine, and tells the other ranks to do the same (`follow`). Its record decides which step is the last.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from headrace.ask.planner import RunPlanner, WaysToPlan
from headrace.engine.beginning import Run, first_record, on_machine
from headrace.engine.replanning import LaneTotals
from headrace.engine.seams import seams_of
from headrace.engine.subject import Subject
from headrace.engine.trainer import Engine
from headrace.engine.tuning import tune
from headrace.flow.step.step_batch import StepBatch, checked_batch, with_idle_rows
from headrace.flow.step.step_state import StepState
from headrace.flow.step.steps import ProgramBuilders, Steps
from headrace.peers.meet.lane_diary import LaneDiary, ops_of
from headrace.peers.ranks.fleet import Fleet
from headrace.peers.ranks.sharing import Introduction, be_introduced, own_part
from headrace.plan.schedules.forward import build_forward
from headrace.plan.schedules.train import build_program, build_tail
from headrace.plan.value.plan import Plan
from headrace.store.shard_store import ShardStore
from headrace.terms.errors import ConfigError, DataError
from headrace.terms.events import Evaluation, Sink, StepResult
from headrace.terms.saving import Saved, Saving
from headrace.update.combinations import refuse_in_ranks


class ShardedEngine(Engine):
    """An engine whose `seams` have a fleet. Every rank has one; only rank 0's is driven by others than `follow`."""

    _has_all_rows = False
    _keeps_plan = "ranks and stages keep the plan on which they agreed"
    _schedule = ProgramBuilders(
        partial(build_program, shared=True), partial(build_tail, shared=True), partial(build_forward, shared=True)
    )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._told_already = False
        self._emit = self._diary = LaneDiary(run.sink)
        self._lanes = LaneTotals(self._diary)
        self._meter.count(lambda: self._fleet.copy.resident_bytes)
        self._closers.callback(self._fleet.copy.close)
        self._closers.callback(self._fleet.ranks.close)

    _check = staticmethod(refuse_in_ranks)

    @property
    def _fleet(self) -> Fleet:
        fleet = self._subject.seams.fleet
        assert isinstance(fleet, Fleet), "a sharded engine has a fleet"
        return fleet

    def _for_all(self, batch: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the batch, before the other ranks hear of it, if they and this one can step with it.

        Raises:
            DataError, ConfigError: they cannot.
        """
        sequences, length = checked_batch(batch, self.chain.vocabulary)["input_ids"].shape
        plan = self.plan
        assert plan is not None, "ranks begin with a plan"
        num_micro, rows = -(-sequences // plan.batch.micro_batch_sequences), plan.batch.micro_batch_sequences
        if self.chain.collects_asides:
            raise ConfigError(
                f"{type(self.chain.model).__name__} has router losses of a whole step, which ranks do not gather yet. Train on "
                "one machine, or leave them out: router_aux_loss_coef 0"
            )
        if num_micro < self._fleet.size:
            raise DataError(
                f"batch: {sequences} rows are {num_micro} micro-batches of {rows}, too few for {self._fleet.size} ranks"
            )
        shares = self._fleet.shares(num_micro, self.options.gradient_sum)
        if length > plan.batch.sequence_length or max(map(len, shares.values())) > plan.batch.num_micro_batches:
            raise DataError(f"batch: {sequences} rows of {length} tokens are more than the run was planned for")
        return batch

    def _ready(self, sequences: int, length: int) -> Steps:
        plan = self.plan
        assert plan is not None, "ranks begin with a plan"
        if self._steps is None:
            self._steps = self._build_steps(plan)
            self._steps.heed(lambda failure: self._fleet.ranks.end(f"rank {self._fleet.rank}: {failure}"))
        return self._steps

    def _rows(self, plan: Plan, sequences: int, length: int) -> int:
        return plan.batch.micro_batch_sequences

    def _share_of(self, data: StepBatch) -> tuple[StepBatch, int]:
        share = self._fleet.shares(len(data.micro_batches), self.options.gradient_sum)[self._fleet.rank]
        return own_part(data, share), share.start

    def _add_losses(self, state: StepState) -> None:
        self._fleet.count(
            tokens=sum(micro.input_ids.numel() for micro in state.batch.micro_batches) if state.learns else 0,
            bytes_read=self.store.bytes_read,
            bytes_written=self.store.bytes_written,
            peak_bytes=self._meter.peak_bytes(),
        )
        loss = None if state.loss_sum is None else float(state.loss_sum)
        found = self._fleet.collect({"loss": loss, **self._own_words()})
        sums = [each["loss"] for each in found if each["loss"] is not None]
        self._fleet.figures |= {each["figures"]["rank"]: each["figures"] for each in found}
        for rank, each in enumerate(found[1:], start=1) if self._fleet.leads else ():
            begin, step = self._fleet.told_seconds[rank], state.verdict.step
            for op in ops_of(each["lanes"]["ops"], step=step, peer=self._fleet.peer, number=rank, begin_seconds=begin):
                self._run.sink(op)
        self._hear(found, learns=state.learns)
        state.loss_sum = torch.tensor(sum(sums), dtype=torch.float64) if sums else None

    def _own_words(self) -> dict[str, Any]:
        """Return what this rank says at the end of a step, beside its loss."""
        return {"figures": self._fleet.figures[self._fleet.rank], "lanes": self._diary.told()}

    def _hear(self, found: Sequence[Mapping[str, Any]], *, learns: bool) -> None:
        """Take note of what ranks said at the end of a step, or of a pass that scores."""

    # -- what rank 0 is asked for, all ranks do -------------------------------------------------------------------------

    @contextlib.contextmanager
    def _together(self, what: str, batch: Mapping[str, torch.Tensor] | None = None) -> Iterator[None]:
        """Tell the other ranks to do as this one does now, unless they do already."""
        first = not self._told_already
        if first and self._fleet.leads:
            self._fleet.tell({"do": what}, batch)
        self._told_already = True
        try:
            yield
        finally:
            self._told_already = not first

    def step(
        self, batch: Mapping[str, torch.Tensor], *, position: Any = None, learning_rate: float | None = None
    ) -> StepResult:
        """See `Engine.step`; the batch is that of all ranks.

        Raises:
            ConfigError: a `learning_rate` is given: each rank follows the options' schedule.
        """
        if learning_rate is not None:
            raise ConfigError("learning_rate: ranks follow the schedule of their options; leave it out")
        with self._together("step", self._for_all(batch)):
            return super().step(batch, position=position)

    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> Evaluation:
        """See `Engine.evaluate`. Each rank gets rows: where there are too few, rows without labels are added."""
        if self.plan is not None and "input_ids" in batch:
            batch = with_idle_rows(batch, (self._fleet.size - 1) * self.plan.batch.micro_batch_sequences + 1)
        with self._together("evaluate", self._for_all(batch)):
            return super().evaluate(batch)

    def next_logits(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Refused: ranks send losses, not logits.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("next_logits: ranks send losses, not logits; load what the run has exported")

    def _drop_buffers(self) -> None:
        super()._drop_buffers()
        self._fleet.copy.drop()

    def flush(self) -> None:
        """See `Engine.flush`."""
        with self._together("flush"):
            super().flush()

    def save_pretrained(self, out_dir: str | Path, notes: Mapping[str, str] = MappingProxyType({})) -> None:
        """See `Engine.save_pretrained`: rank 0 writes, and reads what the others hold."""
        with self._together("save"):
            self.rest()
            with self._fleet.reaching(self.store):
                super().save_pretrained(out_dir, notes)

    def begin_saving(self, out_dir: str | Path, notes: Mapping[str, str] = MappingProxyType({})) -> Saving:
        """See `Engine.begin_saving`: the directory is whole on return."""
        self.save_pretrained(out_dir, notes)
        return Saved()

    def remove_state(self) -> None:
        """See `Engine.remove_state`."""
        with self._together("remove"):
            super().remove_state()

    def close(self) -> None:
        """See `Engine.close`."""
        failed = self._steps is not None and self._steps.failed
        with contextlib.nullcontext() if self._closed or failed else self._together("close"):
            super().close()

    def follow(self) -> bool:
        """Do what rank 0 tells until the run ends. Return whether its state is removed, because the model is whole.

        Raises:
            PeerLost, StepFailed: a rank is gone, or a step failed; the last committed step is untouched.
        """
        self._told_already = True
        while True:
            words, batch = self._fleet.hear()
            self._diary.begin()
            match words["do"]:
                case "step":
                    self.step(batch)
                case "evaluate":
                    self.evaluate(batch)
                case "flush":
                    self.flush()
                case "save":
                    self.rest()
                case "read":
                    self._fleet.answer(self.store, words)
                case "remove":
                    self.remove_state()
                    return True
                case _:
                    return False


def join_as_rank(
    fleet: Fleet,
    place: Callable[[Mapping[str, Any]], Path],
    sink: Sink,
    kind: type[ShardedEngine] = ShardedEngine,
    own: Mapping[str, Any] = MappingProxyType({}),
) -> ShardedEngine:
    """Return the engine of a rank that follows rank 0; `place` says where its part lies (`be_introduced`).

    `own` are options that it has itself, such as its budgets, if it has any.

    Raises:
        PeerLost: rank 0 is gone.
        InputError, DiskFull: the run cannot be shared out here.
    """
    told = be_introduced(fleet, place)
    told = replace(told, options=on_machine(replace(told.options, **own))[0])
    with contextlib.ExitStack() as closers:
        seams = replace(seams_of(told.options, told.wire), fleet=fleet)
        subject = Subject(told.model, fleet.planned_options(told.options), seams)
        closers.callback(subject.close)
        planner = RunPlanner(fleet.planned_options(told.options), subject.planned, WaysToPlan())
        fleet.follow_plan(planner, told.plan, subject.chain)
        store = _begun(fleet, told, subject, planner, sink) if told.at is None else _resumed(fleet, told, sink)
        closers.callback(store.close)
        plan = Plan.from_json(store.record["plan"]) if fleet.by_stages else told.plan
        run = Run(told.options, subject, planner, store, plan, sink, closers)
        run.settle()
        run.closers = closers.pop_all()
        return kind(run)


def _begun(fleet: Fleet, told: Introduction, subject: Subject, planner: RunPlanner, sink: Sink) -> ShardStore:
    """Make this rank's store, fill it with what rank 0 sends, and commit."""
    directory = told.base / "run"
    directory.mkdir(parents=True, exist_ok=True)
    directories = told.options.budget.ssd or (directory,)
    if fleet.by_stages:
        batch = told.plan.batch
        told = replace(told, plan=planner.plan(batch.tokens_per_step, batch.sequence_length, state=directories))
    store = subject.create_store(directory, directories, None, told.plan, sink)
    assert isinstance(store, ShardStore), "a rank's store"
    try:
        tune(store, told.options.machine)
        fleet.adopt(store)
        while (words := fleet.hear()[0])["do"] == "write":
            fleet.answer(store, words)
        store.commit(told.record or first_record(told.options.to_record(), told.plan, subject))
    except BaseException:
        store.remove()
        raise
    return store


def _resumed(fleet: Fleet, told: Introduction, sink: Sink) -> ShardStore:
    """Open this rank's store at the commit that rank 0 names."""
    store = ShardStore.open(told.base / "run", sink=sink, at=told.at)
    fleet.adopt(store)
    tune(store, told.options.machine)
    store.verify()
    return store
