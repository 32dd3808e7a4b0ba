"""The subject of a run: a model in its units' forms, the machine that computes it, and what updates it.

It has neither a plan nor a state: it makes the store for them, fills it, and writes the finished model.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headrace.ask.planner import PlannedModel
from headrace.engine.block_tables import Tables
from headrace.engine.embedding import Embedding
from headrace.engine.layouts import refuse_other_layouts
from headrace.engine.lent_base import PARTED, LentBase, check_lent, marks_of
from headrace.engine.open_model import Purpose, open_model
from headrace.engine.row_files import open_row_files
from headrace.engine.seams import Seams, forms_of
from headrace.files import Beside, stripe_shares
from headrace.flow.step.settle import PROPOSED, changed, settle
from headrace.flow.step.step_state import Verdict
from headrace.flow.weights.buffers import GRADIENT_VIEWS, Buffers
from headrace.flow.weights.completing import read_trained
from headrace.flow.weights.expert_source import ExpertSource
from headrace.flow.weights.experts import Experts
from headrace.flow.weights.load import UnitReader, import_model
from headrace.flow.weights.make import Maker
from headrace.flow.weights.parted_base import ExpertUnits, refuse_dense, refuse_trained_parts
from headrace.losses.router import note_router_loss, with_router_loss
from headrace.machine.cpu import CpuMachine
from headrace.machine.here import this_machine
from headrace.machine.protocol import Machine
from headrace.model import Chain, exact_units
from headrace.model.adapters.adapters import Adapters
from headrace.model.streams.block_parts import block_parts
from headrace.model.streams.stored_experts import NotStoredSingly
from headrace.plan.value.buffer_sizes import scratch_bytes
from headrace.plan.value.plan import Plan
from headrace.store import StateStore, StoreRequest
from headrace.store.committed import ReadableState
from headrace.store.shard_store import ShardStore
from headrace.terms.block_parts import BlockParts
from headrace.terms.cuts import least_chunk_elements
from headrace.terms.errors import RunDirectoryError
from headrace.terms.events import Sink
from headrace.terms.forms import Form
from headrace.terms.options.options import Options
from headrace.terms.rule_figures import RuleFigures
from headrace.terms.sizes import format_bytes
from headrace.update import Updater, optimizer_of, rule_of
from headrace.update.tables.table_rows import FirstRows, TableRows
from headrace.update.wires.rows import rows_in_place_of
from headrace.update.wires.stored_codes import stored_codes
from headrace.update.wires.wire import Content, Wire

# Elements of a chunk in a state that is made before there is a plan.
_CHUNK_ELEMENTS = 4 << 20


class Subject:
    """Opens the model in `directory` for a run under `options` and `seams`. Close it after the last step.

    Attributes:
        parted, experts: experts that are parts, and what reads them once there is a store; None where blocks come whole.
        block_tables: tables in blocks; `read_rows`: whether rows of all come one by one (None: as a run begins).
        lent: the units whose frozen weights are read in the model's files; `lends` is asked whether they may be.
        checkpoint, chain, weights: the model as it is stored, as units, and where each of their parameters is stored.
        stored: which of its blocks the files already hold coded.
        machine: what computes it.
        optimizer, rule, own_rule: the rule's settings, its figures, and those for trained families of their own. The latter are
            float32 whatever compute reads (None if no unit has one).
        forms, maker: how each unit exists, and what makes its weights.
        updater, own_updater: what updates on the host: in place, and in trained families of their own.
        cores: the number of threads that torch had before.

    Raises:
        InputError: the model, an option or a seam cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        options: Options,
        seams: Seams,
        lends: Callable[[Sequence[Path]], bool] = lambda files: False,
        *,
        parted: bool = False,
        read_rows: bool | None = None,
    ) -> None:
        self.directory = directory
        self._sequence_length = options.sequence_length if options.tokens_per_step else None
        self._gradient_sum = options.gradient_sum
        self._gradient_dtype = options.gradient_dtype or options.compute_dtype
        self.optimizer = optimizer_of(options)
        rule = rule_of(self.optimizer, options.compute_dtype)
        self.rule: RuleFigures = rule.figures
        computes = seams.workers is None
        self.machine: Machine = this_machine(options.budget.device_bytes) if computes else CpuMachine()
        purpose = Purpose(
            compute_dtype=options.compute_dtype,
            optimizer=self.optimizer,
            parameter_alignment=self.rule.parameter_alignment,
            configured=partial(with_router_loss, options=options),
            leave_out_blocks=options.leave_out_blocks,
            computes=computes,
            compile_blocks=options.compile_blocks,
            liger=options.liger,
        )
        opened = open_model(directory, self.machine, purpose)
        self.checkpoint, self.chain, self.weights = opened.checkpoint, opened.chain, opened.weights
        note_router_loss(self.chain, options)
        self.seams = seams = replace(seams, wire=seams.wire.of(self.chain))
        self._closers = ExitStack()
        self.lent = LentBase({})
        self._closers.enter_context(self.chain.adapted(seams.wire.adapters))
        alone = seams.fleet is None and seams.site is None and seams.workers is None
        self.embedding = Embedding(self.chain, self.weights, alone=alone)
        self.block_tables = Tables(self.chain, self.weights, seams.wire, alone=alone, every=read_rows)
        self.parted: ExpertUnits | None = None
        self.experts: ExpertSource | None = None
        self.own_updater: Updater | None = None
        files = [tensor.path for tensor in self.checkpoint.tensors.values()]
        self._lends = seams.wire.is_beside and seams.codec is None and lends(files)
        self._find_forms()
        if parted:
            self.part_experts()
        if (embedding := seams.wire.row_families.get(0)) and embedding.stored:
            self.embedding.refuse_whole()
        self.cores = torch.get_num_threads()
        # It gets the plan's threads as soon as there is a plan.
        self.updater = Updater(rule, 1)

    def _find_forms(self) -> None:
        if self._lends:
            self.lent = LentBase.of(self.chain, self.weights, on_cpu=not self.machine.separate_device)
            self.lent.lay_out(self.chain)
        self.stored = stored_codes(self.chain, self.weights, self.rule.planes)
        self.use_wire(self.seams.wire)

    def part_experts(self) -> None:
        """Have experts be parts from here on: frozen ones are read in the model's files. To be called before there is a store.

        Raises:
            NotStoredSingly: they cannot be; nothing has changed.
        """
        refuse_dense(self.chain)
        seams, separate = self.seams, self.machine.separate_device
        if seams.codec or seams.site or seams.workers or seams.fleet:
            raise NotStoredSingly("experts are coded by the run, or shared out among machines")
        if self.chain.runs_by_samples(self._sequence_length or 0):
            raise NotStoredSingly("rows are run sample by sample")
        if isinstance(self.chain.adapters, Adapters):
            self.parted = ExpertUnits.frozen(self.chain, self.weights, on_cpu=not separate)
        else:
            refuse_trained_parts(self.forms, self._gradient_sum)
            self.parted = ExpertUnits.trained(self.chain, separate=separate)
        self.parted.install(self.chain)
        self._find_forms()

    def take_tables(self) -> bool:
        """Return whether tables were still in their blocks. Their rows come one by one from here on; there is no store yet."""
        if wire := self.block_tables.take_rest(self.seams.wire, self.optimizer, self._gradient_sum):
            self.seams = replace(self.seams, wire=wire)
            self._find_forms()
        return wire is not None

    @property
    def kept(self) -> Chain:
        """The chain with units as a state has them, not to be run."""
        return self.embedding.whole(self.parted.kept(self.chain) if self.parted else self.chain)

    def use_wire(self, wire: Wire) -> None:
        """Let gradients travel by `wire`. To be called before there is a plan or a store."""
        self.seams = seams = replace(self.seams, wire=wire)
        on_host = self.machine.device.type == "cpu"
        forms = forms_of(self.kept, seams, self.rule, self.optimizer, self.stored, on_host=on_host)
        self.forms = tuple(replace(form, is_lent=unit in self.lent.units) for unit, form in enumerate(forms))
        codecs = {**seams.codecs, **self.stored.codecs}
        self.maker = Maker(self.forms, wire, self.chain.compute_dtype, codecs, self.stored.readers)
        own = any(form.has_own_family or form.table for form in self.forms)
        own_rule = rule_of(self.optimizer, "float32") if own else None
        if own_rule is not None:
            wire.refuse(self.optimizer)
        self.own_rule: RuleFigures | None = own_rule.figures if own_rule else None
        if self.own_updater is not None:
            self.own_updater.close()
        self.own_updater = Updater(own_rule, 1) if own_rule else None

    def learn_rows(self) -> None:
        """Train the embedding by rows from here on, to the same bits. To be called before there is a store.

        Raises:
            ConfigError: that is not possible; nothing has changed.
        """
        wire = rows_in_place_of(self.seams.wire, self.chain, self.optimizer, self._gradient_sum)
        self.embedding.refuse_whole()
        self.use_wire(wire)

    def choose_wire(self, suits: Callable[[tuple[Form, ...]], bool]) -> None:
        """Use the first wire, among those that this one leaves open, whose forms suit; if none does, the last."""
        choices = self.seams.wire.choices(self.kept.layouts[1 : self.chain.num_blocks + 1])
        for choice in choices if len(choices) > 1 else ():
            self.use_wire(choice)
            if suits(self.forms):
                return

    @property
    def export_notes(self) -> tuple[str, ...]:
        """What a reader of the exported files should know."""
        return self.seams.wire.notes

    @property
    def planned(self) -> PlannedModel:
        """What a planner reads of it."""
        return PlannedModel(
            chain=self.chain,
            machine=self.machine,
            weights=self.weights,
            forms=self.forms,
            rule=self.rule,
            own_rule=self.own_rule,
            cores=self.cores,
            warm_up=self.warm_up,
            experts=self.parted.experts if self.parted else None,
            sharers=self.seams.fleet.copy.sharers if self.seams.fleet else 1,
            embedding=self.embedding.rows,
            own_head=self.embedding.own_head,
            cuts=self.cuts,
        )

    def cuts(self) -> BlockParts | None:
        """Return how frozen blocks can come in parts on a separate device; None where they cannot."""
        seams = self.seams
        alone = not (seams.fleet or seams.site or seams.workers or self.parted)
        return block_parts(self.chain, self.forms) if alone and self.machine.separate_device else None

    @property
    def head_passes(self) -> int:
        """How often a step passes the head: twice for a loss of the whole step."""
        return 2 if self.seams.token_loss else 1

    def warm_up(self) -> None:
        """Compile and load what updates will use."""
        dtype = GRADIENT_VIEWS[self._gradient_dtype].name
        if any(form.in_place for form in self.forms):
            self.updater.warm_up(dtype)
        if self.own_updater is not None:
            self.own_updater.warm_up(dtype)

    def use_threads(self, plan: Plan) -> None:
        """Compute and update with the threads of `plan`; with fewer cores than that, a resumed run uses all there are."""
        torch.set_num_threads(min(plan.compute_threads, self.cores))
        threads = min(plan.updates.threads, self.cores)
        self._close_updaters()
        self.updater = Updater(self.updater.rule, threads)
        self.own_updater = Updater(self.own_updater.rule, threads) if self.own_updater else None
        self.warm_up()

    def create_store(
        self, directory: Path, ssd: tuple[Path, ...], beside: Beside | None, plan: Plan | None, sink: Sink
    ) -> StateStore:
        """Return a new store for the units' state, with the scratch space of `plan`, leaving space for `beside`.

        Raises:
            DiskFull: there is no space for both; nothing has been written.
        """
        largest_unit = max(layout.num_elements for layout in self.kept.layouts)
        planes = self.rule.planes
        own_planes = self.own_rule.planes if self.own_rule else planes
        usual = max(min(_CHUNK_ELEMENTS, largest_unit), *(least_chunk_elements(form.cuts) for form in self.forms))
        chunk_elements = plan.updates.chunk_elements if plan else usual
        units = [form.families(planes, own_planes, chunk_elements) for form in self.forms]
        request = StoreRequest(
            directories=ssd,
            units=self.seams.fleet.share.of(units) if self.seams.fleet else units,
            scratch_bytes=scratch_bytes(plan) if plan else 0,
            weights=stripe_shares(ssd),
            identity={"model": str(self.directory), **self.seams.names, **self._files(plan), **self._groups},
            beside=beside,
        )
        kind = ShardStore if self.seams.fleet else StateStore
        return self.use_lent(kind.create(directory, request, sink=sink), sink)

    def open_rows(self, store: StateStore, closers: ExitStack) -> TableRows | None:
        """Return the rows of the run's tables, whose files `closers` close; None if it has none. See `open_row_files`."""
        rule = self.own_updater.rule if self.own_updater else None
        rows = open_row_files(self.seams.wire, store, rule, self._first_rows, self._gradient_dtype)
        if rows is not None:
            closers.callback(rows.close)
            self.embedding.learn(rows)
            self.block_tables.learn(rows)
        return rows

    def _first_rows(self, unit: int) -> FirstRows:
        return self.block_tables.first_rows(unit) if unit else self.embedding.first_rows(unit)

    @property
    def importing(self) -> str:
        """What a person is told before `import_into`."""
        text = f"importing {format_bytes(self.checkpoint.num_bytes)} of weights"
        if not self.lent.units:
            return text
        units = f"{len(self.lent.units)} of {len(self.forms)} units"
        return f"{text}; those of {units} are read from {self.directory}: do not change its files"

    def _files(self, plan: Plan | None) -> dict[str, Any]:
        """The files that the run reads: of lent units, of experts that are parts, of rows of tables."""
        parts = {PARTED: marks_of(self._parted_base.paths)} if self._parted_base else {}
        return {**self.lent.identity, **parts, **self.embedding.identity(plan), **self.block_tables.identity}

    @property
    def _groups(self) -> dict[str, str]:
        """How samples of packed rows are grouped, where that decides numbers."""
        length = self._sequence_length
        exactly = self.chain.runner.by_exact_lengths and (length is None or self.chain.groups_exactly(length))
        return {"groups": "exact"} if exactly else {}

    def import_into(self, store: StateStore, record: Mapping[str, Any]) -> None:
        """Read the model's weights into a new store, and commit `record`."""
        import_model(self.weights, store, self.maker, record, self.seams.site)

    @property
    def finished_bytes(self) -> int:
        """Bytes that `export` writes."""
        return self.seams.wire.export_bytes(self.checkpoint)

    def export(self, store: ReadableState, directory: Path, notes: Mapping[str, str]) -> None:
        """Write the newest weights of `store` as an ordinary Hugging Face directory, with `notes` as files; or what the run's
        wire has instead.
        """
        exact = exact_units(self.kept, self.weights)
        readers = partial(UnitReader, store, self.maker, self.seams.site, exact), partial(read_trained, store)
        chain = self.block_tables.whole(self.embedding.whole(self.parted.whole(self.chain) if self.parted else self.chain))
        self.seams.wire.export(Content(self.checkpoint, chain, self.weights, *readers, notes), directory)

    def settles(self, verdict: Verdict) -> bool:
        """Return whether a step leaves something that `settle` must put into use: a new basis, or weights to be merged."""
        changes = self.seams.wire.merges_each_step or any(map(changed, verdict.proposals.values()))
        return changes and verdict.skipped is None

    def settle(self, store: StateStore) -> None:
        """Merge weights with what is trained of subspaces, if the newest commit asks for it or every step does.

        No step may be under way, and no buffers may exist.
        """
        wire, record = self.seams.wire, store.record
        if record.get(PROPOSED) or (record.get("num_steps") and wire.merges_each_step):
            settle(store, self.maker, wire, record)

    def use_lent(self, store: StateStore, sink: Sink) -> StateStore:
        """Have `store` read what lies in the model's files, and return it."""
        base = self._parted_base
        if self.lent.units or base:
            reader = self.lent.open(sink, base.paths if base else ())
            store.lend(reader)
            if base:
                self.experts = base.source(self.chain, self.weights, reader.reader)
        return store

    @property
    def _parted_base(self) -> ExpertUnits | None:
        """Frozen experts that are parts, which the run reads in the model's files."""
        return self.parted if self.parted and not self.parted.experts.is_trained else None

    def experts_of(self, plan: Plan, buffers: Buffers) -> Experts | None:
        """Return what brings experts that are parts of `plan`; None where there are none."""
        if plan.experts is None or self.parted is None or (self.experts is None and not plan.experts.is_trained):
            return None
        return Experts(plan.experts, self.parted.places, buffers, self.machine, self.experts)

    def check_layouts(self, store: StateStore) -> None:
        """Refuse to read one model's state as that of another.

        Raises:
            RunDirectoryError: the store was laid out for other parameters, or the files that it reads have changed.
        """
        check_lent(store.manifest.identity)
        if self._groups and store.manifest.identity.get("groups") != self._groups["groups"]:
            raise RunDirectoryError(
                "this run began under a version that padded samples of similar length together, which changes this model's "
                "results. This version groups them by exact length: resume with that version, or start a new run"
            )
        refuse_other_layouts(self.directory, store.manifest.layouts, self.kept.layouts)

    def close(self) -> None:
        """End the updaters' threads, and give torch the threads back that it had before."""
        self._close_updaters()
        self._closers.close()
        torch.set_num_threads(self.cores)

    def _close_updaters(self) -> None:
        self.updater.close()
        if self.own_updater is not None:
            self.own_updater.close()
