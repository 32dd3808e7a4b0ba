"""How a run begins, and how it is resumed: the parts that an engine steps with.

Invariant: a run that cannot begin leaves nothing behind; a resumed one has the options and the plan of its last commit.
"""

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.ask.planner import RunPlanner, WaysToPlan
from headrace.engine.company import refuse_without_stages
from headrace.engine.lent_base import IDENTITY, PARTED, TABLES, lie_together
from headrace.engine.replanning import REPLANS_LEFT
from headrace.engine.seams import Seams, seams_of
from headrace.engine.subject import Subject
from headrace.engine.tuning import tune
from headrace.files import Beside, file_systems
from headrace.flow.step.shards import SharedSource
from headrace.flow.step.step_state import PartedUnits, Parts
from headrace.flow.step.update import device_updater
from headrace.flow.weights.buffers import Buffers
from headrace.flow.weights.expert_sums import ExpertSums
from headrace.flow.weights.ranged_head import RangedHead
from headrace.flow.weights.weights import StoreSource
from headrace.machine.host_memory import Bytes, keep_freed_memory
from headrace.machine.protocol import Machine
from headrace.model.streams.block_parts import cut_blocks
from headrace.model.streams.stored_experts import NotStoredSingly
from headrace.plan.clock.machine_profiles import load_profile
from headrace.plan.value.block_tables import most_rows_of
from headrace.plan.value.buffer_sizes import scratch_bytes
from headrace.plan.value.expert_plan import note_on_parts
from headrace.plan.value.plan import Plan
from headrace.plan.value.refusal import least_of, with_whole_blocks
from headrace.store import StateStore, make_run_directory
from headrace.store.model_here import whole_model_at
from headrace.store.shard_store import ShardStore
from headrace.terms.embedding_rows import note_on_learned_rows
from headrace.terms.errors import ConfigError, PlanInfeasible, RunDirectoryError
from headrace.terms.events import Notice, Planned, Sink
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.options import Options
from headrace.terms.packed_rows import PackedRows
from headrace.update.tables.table_rows import TableRows
from headrace.update.wires.going_on import going_on

Measure = Callable[[Plan, Machine], Ceilings | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """What is known of a whole run besides its options.

    `final` is where the model will be written at the end, beside the state: without space for both, no run begins. `packed` are
    the rows with which the run begins.
    """

    final: Path | None = None
    packed: PackedRows | None = None


@dataclass
class Run:
    """A run that is open: what an engine steps with. `close` it after the last step; `plan` is None where none was made yet."""

    options: Options
    subject: Subject
    planner: RunPlanner
    store: StateStore
    plan: Plan | None
    sink: Sink
    closers: contextlib.ExitStack
    rows: TableRows | None = None

    def import_model(self, more: dict[str, Any]) -> None:
        """Say what will be trained, and write the first commit: the model's weights, a record of the run, and `more` in it."""
        fleet = self.subject.seams.fleet
        if fleet:
            fleet.introduce(self.subject, self.store, self.options, self.plan)
        if self.plan is not None:
            self.sink(Planned(plan=self.plan))
        if warning := self.options.schedule.warning:
            self.sink(Notice(text=warning))
        self.sink(Notice(text=self.subject.importing, level="info"))
        with fleet.reaching(self.store, importing=True) if fleet else contextlib.nullcontext():
            self.subject.import_into(self.store, first_record(self.options.to_record(), self.plan, self.subject) | more)

    def settle(self) -> None:
        """Compare the model with the state, and put into use what the newest commit leaves to be merged.

        Raises:
            RunDirectoryError: the state is of another model, or the files that it reads have changed.
        """
        self.subject.check_layouts(self.store)
        self.subject.settle(self.store)

    def parts(self, plan: Plan) -> Parts:
        """Return what steps of `plan` work with; its buffers are made here."""
        subject = self.subject
        self.store.grow_scratch(scratch_bytes(plan))
        subject.use_threads(plan)
        subject.chain.take_head_by(plan.batch.head_rows)
        subject.embedding.place(plan)
        if self.rows is not None:
            self.rows.most_held = most_rows_of(plan, [form.table for form in subject.forms if form.table])
        buffers, source = Buffers(plan, subject.machine, self._shared), self._source
        experts = subject.experts_of(plan, buffers)
        return Parts(
            plan=plan,
            chain=subject.chain,
            machine=subject.machine,
            buffers=buffers,
            store=self.store,
            source=source,
            updater=subject.updater,
            own_updater=subject.own_updater,
            forms=subject.forms,
            wire=subject.seams.wire,
            site=subject.seams.site,
            seed=self.options.seed,
            sink=self.sink,
            workers=subject.seams.workers,
            **subject.seams.company,
            token_loss=subject.seams.token_loss,
            rows=self.rows,
            device_updater=device_updater(plan, subject.machine, subject.updater.rule),
            parted=PartedUnits(
                experts=experts,
                sums=ExpertSums(experts, buffers, subject.machine) if experts and experts.are_trained else None,
                cut=cut_blocks(subject.chain, plan.parts),
                head=RangedHead(plan, subject.chain, subject.machine, buffers, source) if plan.head_slot_bytes else None,
            ),
        )

    @property
    def _shared(self) -> Callable[[int], Bytes] | None:
        """What gives memory that the ranks of a machine have together, where there are several."""
        fleet, machine = self.subject.seams.fleet, self.subject.machine
        if fleet is None or not fleet.copy.is_used:
            return None
        copy = fleet.copy
        return lambda num_bytes: machine.pinned(copy.map(num_bytes))

    @property
    def _source(self) -> StoreSource:
        """Where weights come from."""
        seams, maker = self.subject.seams, self.subject.maker
        if seams.fleet and not seams.fleet.by_stages:
            return SharedSource(self.store, maker, seams.fleet)
        return StoreSource(self.store, maker, seams.site)


def begin_run(
    model: Path,
    options: Options,
    sink: Sink,
    ways: WaysToPlan,
    *,
    measure: Measure | None = None,
    whole: WholeRun | None = None,
    seams: Seams | None = None,
) -> Run:
    """Import the model directory `model` into a new store; see `Engine.open`.

    Raises:
        InputError: the model, a directory or an option cannot be used; nothing has been allocated or written.
        DiskFull: there is no space for the state, or for the finished model; nothing has been written.
        PlanInfeasible: the budget is too small; the message says what would help.
    """
    whole = whole or WholeRun()
    if (adapter := going_on(options.adapter)) != options.adapter:
        options = replace(options, adapter=adapter)
    options, _ = on_machine(options)
    whole_model_at(model)
    _ = options.schedule  # refuses one without an end
    with contextlib.ExitStack() as closers:
        if options.output is None:
            directory = Path(closers.enter_context(tempfile.TemporaryDirectory(prefix="headrace-")))
        else:
            directory = Path(options.output)
        directories = options.budget.ssd or (directory,)
        fleet = seams.fleet if seams else None
        seams = replace(seams_of(options), fleet=fleet) if fleet else seams
        refuse_without_stages(options, fleet)
        planned = fleet.planned_options(options) if fleet else options
        subject = _subject(closers, model, planned, seams, lambda files: not fleet and lie_together(files, directories))
        subject.use_wire(subject.seams.wire.begun(subject.chain, subject.weights))
        ways = replace(ways, packed=whole.packed, groups_only=bool(fleet), head_passes=subject.head_passes)
        planner = RunPlanner(planned, subject.planned, ways)
        beside = Beside.models(options.models_at_once, whole.final, subject.finished_bytes) if whole.final else None
        plan = None
        if fleet:
            fleet.settle_on(options, planner, subject.chain)
        if options.tokens_per_step is not None:
            options, planner, plan = _first_plan(subject, planner, options, ways, measure, state=directories, beside=beside)
        with contextlib.ExitStack() as undo:
            make_run_directory(directory, undo)
            store = subject.create_store(directory, directories, beside, plan, sink)
            undo.callback(store.remove)
            rows = subject.open_rows(store, undo)
            tune(store, options.machine)
            run = Run(options, subject, planner, store, plan, sink, closers, rows)
            run.import_model({REPLANS_LEFT: 0} if ways.given else {})
            undo.pop_all()
        closers.callback(store.close)
        if options.output is None:
            closers.callback(store.remove)
        if rows is not None:
            closers.callback(rows.close)
        run.settle()
        run.closers = closers.pop_all()
        return run


def resume_run(
    run_directory: Path,
    sink: Sink,
    ways: WaysToPlan,
    *,
    verify: bool,
    check: Callable[[Options], None],
    seams: Seams | None,
) -> Run:
    """Return an existing run at its last committed step; see `Engine.resume`.

    Raises:
        RunDirectoryError: there is no run, it has another format version, another process uses it, or it has other seams.
        CorruptData: a state record does not have the checksum it was written with.
    """
    with contextlib.ExitStack() as closers:
        fleet = seams.fleet if seams else None
        store = (ShardStore if fleet else StateStore).open(run_directory, sink=sink)
        closers.callback(store.close)
        recorded = store.record.get("options")
        if not isinstance(recorded, dict):
            raise RunDirectoryError(f"{run_directory}: its newest record holds no options; it cannot be resumed")
        options = Options.from_record(recorded)
        check(options)
        own = seams_of(options, store.manifest.identity.get("wire"))
        if fleet:
            fleet.agree(store.manifest.identity, options)
        seams = replace(own, fleet=fleet) if fleet else seams or own
        seams.check(store)
        tune(store, options.machine)
        if verify:
            store.verify()
        model = Path(str(store.manifest.identity["model"]))
        planned = fleet.planned_options(options) if fleet else options
        identity = store.manifest.identity
        # Experts are parts as the run began, where they are frozen; trained ones by its plan.
        parted = PARTED in identity or bool((store.record.get("plan") or {}).get("experts"))
        begun = {"parted": parted, "read_rows": TABLES in identity}
        subject = _subject(closers, model, planned, seams, lambda files: IDENTITY in identity, **begun)
        planner = RunPlanner(planned, subject.planned, replace(ways, head_passes=subject.head_passes))
        subject.use_lent(store, sink)
        plan = None
        if found := store.record.get("plan"):
            plan = planner.plan_here(Plan.from_json(found), lambda text: sink(Notice(text=text)))
        if fleet:
            store, plan = fleet.take_up(run_directory, subject, planner, store, options, plan, sink)
            closers.callback(store.close)
        run = Run(options, subject, planner, store, plan, sink, closers, subject.open_rows(store, closers))
        run.settle()
        run.closers = closers.pop_all()
        return run


def on_machine(options: Options) -> tuple[Options, Ceilings | None]:
    """Return the options with the profile that they name, of the drives that they use; and that profile, if there is one."""
    machine = load_profile(options.machine) if isinstance(options.machine, str) else options.machine
    if machine is None:
        return options, None
    return replace(options, machine=machine.of_directories(file_systems(options.budget.ssd) or (0,))), machine


def first_record(options: dict[str, Any], plan: Plan | None, subject: Subject) -> dict[str, Any]:
    """Return what the first commit says, with `options` as records have them: the model is imported, no step is done."""
    return {
        "options": options,
        "plan": plan.to_json() if plan else None,
        "num_steps": 0,
        "updates": (0,) * len(subject.chain.layouts),
        "position": None,
        "loss_scale": None,
    }


def _first_plan(
    subject: Subject, planner: RunPlanner, options: Options, ways: WaysToPlan, measure: Measure | None, **where: Any
) -> tuple[Options, RunPlanner, Plan]:
    """Return the plan of a step and its planner, and the options; where the machine was measured for it, these name it.

    `where` says where the state will lie, and what lies beside it (`RunPlanner.plan`).
    """
    assert options.tokens_per_step is not None, "the caller looks"
    fleet, step = subject.seams.fleet, (options.tokens_per_step, options.sequence_length or options.tokens_per_step)
    if fleet:
        step = fleet.share_of_step(planner, step, options.gradient_sum, **where)
    subject.choose_wire(lambda forms: planner.suits(forms, *step, **where))
    planner, plan = _planned(subject, planner, ways, lambda by: by.plan(*step, **where))
    if measure is not None and options.machine is None and (found := measure(plan, subject.machine)) is not None:
        planner.use(found := found.of_directories(file_systems(where["state"])))
        plan = planner.plan(*step, **where)
        options = replace(options, machine=found)
    return options, planner, fleet.shared_plan(plan) if fleet else plan


def _planned(
    subject: Subject, planner: RunPlanner, ways: WaysToPlan, plan_by: Callable[[RunPlanner], Plan]
) -> tuple[RunPlanner, Plan]:
    """Return a plan, and the planner that made it. Where nothing fits, tables in blocks are read by rows. Where that is not
    enough, experts become parts, if they can be; if not, the embedding is trained by rows, if it can be.
    """
    given = ways.given
    takes = ways.may_learn_rows or subject.seams.wire.is_beside
    if given is not None and given.results.tables and takes and subject.take_tables():
        planner = planner.of(subject.planned)
    if subject.parted is None and (subject.seams.parted or (given is not None and given.experts is not None)):
        subject.part_experts()
        planner = planner.of(subject.planned)
    elif given is not None and given.embedding is not None and given.embedding.learns and subject.forms[0].table is None:
        subject.learn_rows()
        planner = planner.of(subject.planned)
    try:
        return planner, plan_by(planner)
    except PlanInfeasible as refusal:
        if given is None and takes and subject.take_tables():
            return _planned(subject, planner.of(subject.planned), ways, plan_by)
        if subject.parted is not None:
            raise
        try:
            subject.part_experts()
        except NotStoredSingly as why:
            words = str(why)
        else:
            subject.chain.notes += (note_on_parts(refusal.tier, refusal.needed_bytes),)
            planner = planner.of(subject.planned)
            return planner, plan_by(planner)
        return _with_rows(subject, planner, ways, plan_by, refusal, words)


def _with_rows(
    subject: Subject,
    planner: RunPlanner,
    ways: WaysToPlan,
    plan_by: Callable[[RunPlanner], Plan],
    refusal: PlanInfeasible,
    words: str,
) -> tuple[RunPlanner, Plan]:
    """Return a plan that trains the embedding by rows, and the planner that made it, where the whole was refused. `words`: see
    `with_whole_blocks`.
    """
    refused = with_whole_blocks(refusal, words)
    if not ways.may_learn_rows or ways.given is not None or refused.tier == "ssd":
        raise refused
    try:
        subject.learn_rows()
    except ConfigError:
        raise refused from None
    subject.chain.notes += (note_on_learned_rows(refused.tier, refused.needed_bytes),)
    planner = planner.of(subject.planned)
    try:
        return planner, plan_by(planner)
    except PlanInfeasible as least:
        raise least_of(refused, with_whole_blocks(least, words)) from None


def _subject(
    closers: contextlib.ExitStack,
    model: Path,
    options: Options,
    seams: Seams | None,
    lends: Callable[[Sequence[Path]], bool],
    **begun: bool,
) -> Subject:
    keep_freed_memory(False)
    subject = Subject(model, options, seams or seams_of(options), lends, **begun)
    closers.callback(subject.close)
    return subject
