"""A worker's engine: the model runs here, weights come from a node, gradients go there; nothing here is durable.

It is a trainer whose units are all far (`peers/node/site.py`). The node says what decides the bits of a step; the plan here
only says where things lie. The store has no state, only scratch space for block inputs, if there are SSD directories.
"""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headrace.ask.planner import PlannedModel, RunPlanner, WaysToPlan
from headrace.engine.open_model import run_on
from headrace.engine.seams import Seams, forms_of
from headrace.files import stripe_shares
from headrace.flow.run.execute import interpreter_of
from headrace.flow.step.step_batch import StepBatch, step_batch
from headrace.flow.step.step_state import Parts, StepState, Verdict
from headrace.flow.step.steps import Steps
from headrace.flow.weights.arena import TORCH_DTYPES
from headrace.flow.weights.buffers import Buffers
from headrace.flow.weights.make import Maker
from headrace.flow.weights.weights import StoreSource
from headrace.machine.here import this_machine
from headrace.machine.host_memory import keep_freed_memory
from headrace.model import Chain, config_from, set_buffers
from headrace.peers.meet.exchange import NODE
from headrace.peers.meet.generation import Generation
from headrace.peers.meet.lane_diary import LaneDiary
from headrace.peers.meet.same_run import refuse_other_options
from headrace.peers.meet.talk import hear
from headrace.peers.node.crowd import Setup, layouts_digest
from headrace.peers.node.programs import turns_of
from headrace.peers.node.site import NodeSite
from headrace.plan.schedules.forward import build_forward
from headrace.plan.schedules.ledger import Snapshot
from headrace.plan.schedules.train import build_program
from headrace.plan.search.serving import grouping_of
from headrace.plan.value.buffer_sizes import scratch_bytes
from headrace.plan.value.plan import Plan
from headrace.store import StateStore, StoreRequest
from headrace.terms.closing import Closing
from headrace.terms.errors import HeadraceError, ModelError, PeerLost, PlanInfeasible, StorageError
from headrace.terms.events import Planned, Sink, StepResult
from headrace.terms.grouping import Grouping
from headrace.terms.options.options import Options
from headrace.terms.options.summing import TREE, order_from, order_of, shares_of
from headrace.update import HitRate, LossScale, Updater, optimizer_of, rule_of, square_sum

# Of a tree's micro-batches, a fast worker may get so many times its even share.
_MOST_OF_EVEN = 2


def _remove_scratch(store: StateStore) -> None:
    """Remove a worker's scratch files. A directory for temporary files may be cleared meanwhile: nothing in it is missed."""
    with contextlib.suppress(StorageError):
        store.remove()


class Worker(Closing):
    """Computes for the node of `generation`. `own` has the options that belong to this process (budgets, machine). Scratch
    files lie in `folder`, or in the SSD directories of `own`. Options in `asked` must be the node's. Use as a context manager.

    Raises:
        ConfigError: the node's run has other options than `asked`.
        PeerLost: the node is gone.
        InputError, PlanInfeasible: the model cannot be run here, or the budgets are too small.
    """

    def __init__(
        self, generation: Generation, own: Options, folder: Path, sink: Sink, asked: Mapping[str, Any] | None = None
    ) -> None:
        self._generation, self._sink, self._closers = generation, sink, contextlib.ExitStack()
        self._diary = LaneDiary(sink)
        self.steps_done = 0
        keep_freed_memory(False)
        setup = Setup.receive(generation)
        self.total_steps = setup.total_steps
        refuse_other_options(asked or {}, setup.options)
        try:
            self._build(setup, own, folder)
        except HeadraceError:
            self._closers.close()
            raise

    def _build(self, setup: Setup, own: Options, folder: Path) -> None:
        kept = {"host_memory", "device_memory", "machine"}
        values = {key: value for key, value in setup.options.items() if key not in kept}
        options = Options.of(
            values
            | {"host_memory": own.host_memory, "device_memory": own.device_memory, "machine": own.machine, "ssd": own.ssd},
            source="the node's options",
        )
        self._options, optimizer = options, optimizer_of(options)
        rule = rule_of(optimizer, options.compute_dtype)
        dtype = TORCH_DTYPES[options.gradient_dtype or options.compute_dtype]
        site = NodeSite(self._generation, dtype)
        if self._generation.num_workers > 1:  # gradients are rounded after they are added, not before
            self._options = options = replace(options, gradient_dtype="float32")
        config = config_from(setup.config)
        self.chain = Chain.from_config(config, options.compute_dtype, optimizer, rule.figures.parameter_alignment)
        if layouts_digest(self.chain.layouts) != setup.layouts:
            raise ModelError("the model has other parameters here than on the node; install the node's version of transformers")
        set_buffers(self.chain.model, setup.buffers)
        self.machine = this_machine(options.budget.device_bytes)
        run_on(self.machine, self.chain, compile_blocks=options.compile_blocks, liger=options.liger)
        self._seams, self._site = Seams(site=site), site
        self._forms = forms_of(self.chain, self._seams, rule.figures, optimizer)
        self._cores = torch.get_num_threads()
        self._closers.callback(torch.set_num_threads, self._cores)
        self._updater = Updater(rule, 1)
        self._closers.callback(self._updater.close)
        planned = PlannedModel(
            chain=self.chain,
            machine=self.machine,
            weights=None,
            forms=self._forms,
            rule=rule.figures,
            own_rule=None,
            cores=self._cores,
            warm_up=self._warm_up,
        )
        ways = WaysToPlan(adjust=lambda plan: plan.with_updates(checkpoint_every=1))
        self._planner = RunPlanner(options, planned, ways)
        self.plan = self._agree(setup)
        self._sink(Planned(plan=self.plan))
        self.store = self._scratch(folder, own)
        self._steps = self._make_steps()

    def _warm_up(self) -> None:
        square_sum(torch.zeros(64, dtype=torch.float32).numpy())

    def _agree(self, setup: Setup) -> Plan:
        """Return the plan, after the node has said how sums are grouped: as in this worker's own plan, if it is the first."""
        rank, workers, up = self._generation.rank, self._generation.num_workers, self._generation.up
        if setup.grouping is None and rank == 1:
            rows = -(-setup.sequences // max(workers, setup.most))
            plan = self._planner.plan(rows * setup.length, setup.length, state=self._options.budget.ssd)
            found = grouping_of(plan)
            assert found is not None, "a plan that computes groups sums"
            up.send_message({"grouping": found.to_json()}, NODE)
        grouping = Grouping.from_json(self._generation.down.receive_message(NODE))
        self._planner.group(grouping)
        num_micro, way = -(-setup.sequences // grouping.rows), self._options.gradient_sum
        even = max(map(len, shares_of(num_micro, order_of(num_micro, workers, way), way).values()))
        # All plan for the same, so that all take the same turns: of a tree, where those who are fast get more, for more.
        generous = min(_MOST_OF_EVEN * even, num_micro - workers + 1) if way == TREE else even
        for most in sorted({even, generous}, reverse=True):
            try:
                plan = self._planner.plan(most * grouping.rows * setup.length, setup.length, state=self._options.budget.ssd)
                break
            except PlanInfeasible as error:
                if most > even:
                    continue
                if not setup.spares:
                    raise
                up.send_message({"cannot": str(error)}, NODE)
                raise PeerLost(f"stays a spare: {error}") from None
        # Nothing is updated here, and so nothing taken back: what is to be skipped, the node skips.
        plan = plan.with_updates(policy="deferred", late_units=())
        program, _ = build_program(plan, plan.batch.num_micro_batches, Snapshot())
        scoring, _ = build_forward(plan, plan.batch.num_micro_batches, Snapshot())
        up.send_message({"turns": [turns_of(program), turns_of(scoring)], "most": plan.batch.num_micro_batches}, NODE)
        return plan

    def _scratch(self, folder: Path, own: Options) -> StateStore:
        """Return a store without states, for scratch space."""
        directories = own.budget.ssd or (folder,)
        rule = self._updater.rule
        request = StoreRequest(
            directories=directories,
            units=[form.families(rule.planes, rule.planes, self.plan.updates.chunk_elements) for form in self._forms],
            scratch_bytes=scratch_bytes(self.plan),
            weights=stripe_shares(directories),
            identity={"worker": True},
            allow_tmpfs=not own.budget.ssd,
        )
        store = StateStore.create(folder, request, sink=self._sink)
        self._closers.callback(_remove_scratch, store)
        return store

    def _make_steps(self) -> Steps:
        plan = self.plan
        torch.set_num_threads(min(plan.compute_threads, self._cores))
        maker = Maker(self._forms, self._seams.wire, self._options.compute_dtype, self._seams.codecs)
        parts = Parts(
            plan=plan,
            chain=self.chain,
            machine=self.machine,
            buffers=Buffers(plan, self.machine),
            store=self.store,
            source=StoreSource(self.store, maker, self._seams.site),
            updater=self._updater,
            forms=self._forms,
            wire=self._seams.wire,
            site=self._seams.site,
            seed=self._options.seed,
            sink=self._sink,
        )
        steps = Steps(parts, interpreter_of(self._options.interpreter, self.machine, self._diary), HitRate())
        self._closers.callback(self.machine.release_host_buffers)
        self._closers.callback(steps.close)
        return steps

    def work(self) -> None:
        """Take steps until the node says that the run is done.

        Raises:
            PeerLost, StepFailed: the node is gone, or a step failed; nothing that is committed is lost.
        """
        while "end" not in (told := hear(self._generation.down, NODE))[0]:
            self._step(*told)
        self._generation.up.send_message({"end": True}, NODE)

    def _step(self, words: Mapping[str, Any], batch: Mapping[str, torch.Tensor]) -> None:
        started = time.perf_counter()
        self._diary.begin()
        data = step_batch(batch, int(words["rows"]), self.machine.device)
        own_tokens, data = data.trained_tokens, replace(data, trained_tokens=int(words["trained_tokens"]))
        self._site.order = order_from(words["order"])
        verdict = self._verdict(int(words["step"]), float(words["loss_scale"]), float(words["learning_rate"]))

        def state_of(pending: Verdict | None) -> StepState:
            return StepState(self._steps.parts, data, verdict, pending, first_micro=int(words["first_micro"]))

        if words["learns"]:
            state = self._steps.run(len(data.micro_batches), verdict, state_of)
        else:
            state = self._steps.score_afresh(data, verdict)
        loss = None if state.loss_sum is None else float(state.loss_sum)
        aside = None if state.asides.loss is None else float(state.asides.loss)
        self._generation.up.send_message({"loss_sum": loss, "aside_loss": aside, "lanes": self._diary.told()}, NODE)
        if words["learns"]:
            self._tell(verdict, data, (loss or 0.0) / max(1, own_tokens), time.perf_counter() - started)

    def _tell(self, verdict: Verdict, data: StepBatch, loss: float, seconds: float) -> None:
        self.steps_done += 1
        tokens = sum(micro.input_ids.numel() for micro in data.micro_batches)
        self._sink(
            StepResult(
                step=verdict.step + 1,
                loss=loss,
                grad_norm=None,
                learning_rate=verdict.learning_rate,
                tokens=tokens,
                trained_tokens=data.trained_tokens,
                seconds=seconds,
                update_policy="far",
            )
        )

    def _verdict(self, step: int, loss_scale: float, learning_rate: float) -> Verdict:
        return Verdict(
            step=step,
            updates=(0,) * len(self._forms),
            learning_rate=learning_rate,
            gradient_scale=1.0 / loss_scale,
            loss_scale=LossScale(scale=loss_scale) if loss_scale != 1.0 else None,
            max_grad_norm=None,
            durable=False,
            record=lambda verdict: {"num_steps": 0},
        )

    def listen(self, sink: Sink) -> None:
        """Tell `sink` about steps from now on."""
        self._sink = sink

    def close(self) -> None:
        """Free everything."""
        self._closers.close()
