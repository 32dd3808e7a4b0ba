"""The engine's plans: what the model takes in this process, what may be used here, and the search among placements.

Invariant: neither states nor a step's buffers are made or touched: a plan that is refused leaves everything as it was.
"""

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from headrace.ask.place import RunPlace, kept_products_bytes, runtime_here
from headrace.ask.question import ModelToPlan, Question
from headrace.files import Beside, default_ssd_bytes
from headrace.machine.cpu import CpuMachine
from headrace.machine.host_memory import return_pieces
from headrace.machine.protocol import Machine
from headrace.model import Profiles, WeightMap, import_workspace_bytes
from headrace.plan.forecast.footprint import with_runtime
from headrace.plan.search.given import adopted
from headrace.plan.search.problem import Problem
from headrace.plan.search.search import holds_states, make_plan
from headrace.plan.search.serving import grouping_of
from headrace.plan.search.staging import placed
from headrace.plan.value.allowance import Allowance
from headrace.plan.value.plan import Plan
from headrace.plan.value.stage_place import StagePlace
from headrace.store import Manifest
from headrace.terms.errors import ConfigError, StorageError
from headrace.terms.forms import Form
from headrace.terms.grouping import Grouping
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.options import Options
from headrace.terms.packed_rows import PackedRows
from headrace.terms.sizes import format_bytes
from headrace.update.wires.forms import notes_on


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel(ModelToPlan):
    """A model that is planned for, on the machine that computes it.

    `weights` are the checkpoint's, which the import reads (None: nothing is imported). So many ranks of this machine are
    `sharers` of one host copy. `warm_up` loads and compiles what a run will have loaded, so that this process can be measured.
    """

    machine: Machine
    weights: WeightMap | None
    cores: int
    warm_up: Callable[[], None]
    sharers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WaysToPlan:
    """How plans are made. `given` is used instead of searching. Otherwise `search` makes a plan (None: the planner's). `adjust`
    may change each plan. `packed` are the rows with which the run begins, if they are known. Of the given plan of another kind
    of run only the groups of sums are taken (`groups_only`). A loss of the whole step makes two `head_passes`. Where memory is
    short, an embedding `may_learn_rows` in place of the whole.
    """

    given: Plan | None = None
    search: Callable[[Problem, Ceilings | None], Plan] | None = None
    adjust: Callable[[Plan], Plan] | None = None
    packed: PackedRows | None = None
    groups_only: bool = False
    head_passes: int = 1
    may_learn_rows: bool = True


class RunPlanner:
    """Plans the steps of `model`, as `options` ask."""

    def __init__(self, options: Options, model: PlannedModel, ways: WaysToPlan) -> None:
        self._options, self._model, self._chain, self._machine = options, model, model.chain, model.machine
        self._forms, self._ways, given = model.forms, ways, ways.given
        # Of a given plan of another kind (a node's for a machine alone, or the reverse) only the groups of sums are taken.
        other_kind = given is not None and (ways.search is not None or given.serves or ways.groups_only)
        self._given = None if other_kind else given
        self.grouping: Grouping | None = grouping_of(given) if given and other_kind else None
        self._ceilings = options.machine if isinstance(options.machine, Ceilings) else None
        self._profiles = Profiles(model.chain)
        if given is not None:
            self._take_head_by(given.batch.head_rows)
        self._runtime_bytes: int | None = None
        self._place: StagePlace | None = None
        self._chunk_elements: int | None = None

    def of(self, model: PlannedModel) -> "RunPlanner":
        """Return a planner of the same steps for `model` as it is now."""
        return RunPlanner(self._options, model, self._ways)

    def be_stage(self, place: StagePlace, chunk_elements: int | None = None) -> None:
        """Plan for a stage from now on, whose states are cut into such chunks, if others have cut theirs already."""
        self._place, self._chunk_elements = place, chunk_elements

    def block_flops(self, length: int) -> list[float]:
        """Return the operations of each block's forward on a row, with those around the blocks at the ends."""
        costs = self._profiles.of(1, length)
        work = [block.forward_flops for block in costs.blocks]
        work[-1] += costs.epilogue_flops_per_token * length
        return work

    def group(self, grouping: Grouping) -> None:
        """Have sums taken in these groups from now on."""
        self.grouping = grouping
        self._take_head_by(grouping.head_rows)

    def _take_head_by(self, rows: int) -> None:
        if rows != self._chain.head_rows:
            self._chain.take_head_by(rows)
            self._profiles = Profiles(self._chain)

    def use(self, ceilings: Ceilings) -> None:
        """Plan for this machine from now on."""
        self._ceilings = ceilings

    def suits(
        self,
        forms: Sequence[Form],
        tokens_per_step: int,
        sequence_length: int,
        *,
        state: Sequence[Path],
        beside: Beside | None = None,
    ) -> bool:
        """Plan for units of these forms from now on. Return whether host memory holds the states of the trained families beside
        frozen weights. If a plan is given, return whether it is for such units. The other arguments are as for `plan`.

        Raises:
            ConfigError: the lengths do not divide.
        """
        self._forms = tuple(forms)
        problem = self._problem(tokens_per_step, sequence_length, state, beside)
        return self._given.units == problem.units if self._given else holds_states(problem)

    def plan(
        self, tokens_per_step: int, sequence_length: int, *, state: Manifest | Sequence[Path], beside: Beside | None = None
    ) -> Plan:
        """Return the plan for a step of so many tokens. `state` is the run's state, or the directories in which it will be
        made; `beside` is what else will be written there.

        Raises:
            PlanInfeasible: a budget is too small.
            ConfigError: the lengths do not divide, or the given plan is for another run.
        """
        problem = self._problem(tokens_per_step, sequence_length, state, beside)
        plan = adopted(self._given, problem) if self._given else (self._ways.search or make_plan)(problem, self._ceilings)
        return self._told(plan)

    def plan_again(self, now: Plan, ceilings: Ceilings, state: Manifest) -> Plan:
        """Return the fastest plan on a machine with `ceilings` for a run that is under the plan `now`: with the same groups of
        sums, chunks and budgets. `state` is the run's.

        Raises:
            PlanInfeasible: there is none, because something takes more than when `now` was made.
        """
        return self._told((self._ways.search or make_plan)(self._problem_of(now, state), ceilings))

    def adopt(self, plan: Plan, now: Plan, state: Manifest) -> Plan:
        """Return `plan` for a run that is under the plan `now`, within the same budgets. `state` is the run's.

        Raises:
            ConfigError: it is for another run.
            PlanInfeasible: it takes more than the budgets allow.
        """
        return adopted(plan, self._problem_of(now, state))

    def _problem_of(self, now: Plan, state: Manifest) -> Problem:
        """Return the problem that `now` answers: sums in its groups, within its budgets; free space is what it is today."""
        problem = self._problem(now.batch.tokens_per_step, now.batch.sequence_length, state, None, grouping=grouping_of(now))
        allowed = now.results.allowed_bytes
        allowance = replace(
            problem.allowance,
            host_bytes=allowed["host"],
            device_bytes=allowed.get("device"),
            chunk_elements=now.updates.chunk_elements,
        )
        return replace(problem, allowance=allowance)

    def _told(self, plan: Plan) -> Plan:
        """Return a plan that was found, as a run gets it."""
        gc.collect()
        return_pieces()  # gives back the memory of the search, which is in no plan
        if self._place is not None:
            plan = placed(plan, self._place, tuple(form.figures for form in self._forms))
        plan = plan.with_notes((*self._chain.notes, *notes_on(self._forms)))
        return self._ways.adjust(plan) if self._ways.adjust else plan

    def _problem(
        self,
        tokens_per_step: int,
        sequence_length: int,
        state: Manifest | Sequence[Path],
        beside: Beside | None,
        *,
        grouping: Grouping | None = None,
    ) -> Problem:
        costs_of = partial(self._profiles.of, length=sequence_length)
        question = Question.of(
            self._options,
            self._allowance(lambda: costs_of(1), state, beside),
            tokens_per_step=tokens_per_step,
            sequence_length=sequence_length,
            grouping=grouping or self.grouping,
            packed=self._ways.packed,
            head_passes=self._ways.head_passes,
            place=self._place,
        )
        return question.problem(replace(self._model, forms=self._forms), costs_of)

    def plan_here(self, plan: Plan, tell: Callable[[str], None]) -> Plan:
        """Return an earlier process's plan with the memory that libraries take in this one. An excess is reported, not refused:
        the run can have no other budget, and loses nothing if it is ended from outside.
        """
        self._take_head_by(plan.batch.head_rows)
        runtime = self._runtime(lambda: self._profiles.of(1, plan.batch.sequence_length))
        plan = with_runtime(plan, runtime, self._model.sharers)
        if plan.peak("host") > plan.results.allowed_bytes["host"]:
            needed, allowed = format_bytes(plan.peak("host")), format_bytes(plan.results.allowed_bytes["host"])
            tell(f"host memory: {needed} needed, {allowed} allowed: libraries take more than when the run began")
        return plan

    def _allowance(
        self, profile_model: Callable[[], object], state: Manifest | Sequence[Path], beside: Beside | None
    ) -> Allowance:
        stored, weights = state if isinstance(state, Manifest) else None, self._model.weights
        place = RunPlace.here(self._machine, self._runtime(profile_model), self._model.cores)
        return place.allowance(
            self._options.budget,
            ssd_bytes=self._ssd_bytes(state, beside),
            import_workspace_bytes=import_workspace_bytes([form.layout for form in self._forms], weights) if weights else None,
            chunk_elements=stored.chunk_elements if stored else self._chunk_elements,
            saves=self._options.saves,
            sharers=self._model.sharers,
        )

    def _ssd_bytes(self, state: Manifest | Sequence[Path], beside: Beside | None) -> int | None:
        """Return how many bytes may be written; None if a directory cannot be used; creating the files reports it."""
        if isinstance(state, Manifest):
            directories, held = state.directories, sum(path.stat().st_size for path in state.data_paths())
        else:
            directories, held = tuple(state), 0
        if not directories:
            return 0
        # A directory that does not exist yet will lie in one that does.
        there = [next((path for path in (each, *each.parents) if path.exists()), each) for each in directories]
        with contextlib.suppress(StorageError, ConfigError):
            return default_ssd_bytes(self._ceilings, there, held_bytes=held, beside=beside)
        return None

    def _runtime(self, profile_model: Callable[[], object]) -> int:
        """Return the bytes to plan for the interpreter and its libraries. They are measured once, after everything has been
        loaded.
        """
        if self._runtime_bytes is None:
            profile_model()
            self._model.warm_up()
            gc.collect()
            dtype, machine = self._options.compute_dtype, self._machine
            narrow, on_device = CpuMachine().multiplies(dtype), machine.device.type != "cpu"
            kept = kept_products_bytes(self._chain, dtype, on_device=on_device, narrow=narrow)
            self._runtime_bytes = runtime_here() + kept
        return self._runtime_bytes
