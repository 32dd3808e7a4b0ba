"""Does a model fit, how fast does it train, what limits it, and what else would fit? Answered from shapes and a machine
profile.

Invariant: the placement is `make_plan`'s and the times are the simulator's, as for a run; nothing else is estimated.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from headrace.ask.between_steps import BesideSteps
from headrace.ask.model_config import check_positions, open_coded, position_limit, read_parts
from headrace.ask.place import Place, multiplies
from headrace.ask.plan_report import Alternative, PlanReport
from headrace.ask.question import Question
from headrace.ask.variants import Variant, nearest_variants, other_rules, other_wires, smaller_states
from headrace.files import Beside, default_ssd_bytes, file_systems
from headrace.model import Chain, Checkpoint, Profiles, check_whole, export_bytes, import_workspace_bytes, note_on, self_check
from headrace.plan.endurance import endurance
from headrace.plan.footprint import with_footprint
from headrace.plan.forecast import Forecast, StepSeconds, forecast
from headrace.plan.given import adopted, load_plan
from headrace.plan.machine_profiles import load_profile
from headrace.plan.plan import Plan
from headrace.plan.search import holds_states, make_plan, nominal_ceilings, nominal_machine_of
from headrace.plan.space import THRIFTS, Problem, filled, placements_of, plan_of
from headrace.terms.ceilings import Ceilings
from headrace.terms.costs import ModelCosts
from headrace.terms.errors import ConfigError, ModelError, PlanInfeasible
from headrace.terms.forms import Form
from headrace.terms.lanes import Lane, Part
from headrace.terms.layout import realigned
from headrace.terms.options import DEFAULT_ROWS_PER_STEP, DEFAULT_SEQUENCE_LENGTH, Options
from headrace.terms.packed_rows import PackedRows
from headrace.terms.plain_figures import plain_figure
from headrace.terms.sizes import GIB, MIB, format_bytes, round_up
from headrace.update import optimizer_of, rule_of
from headrace.update.forms import Coding, forms_under, notes_on
from headrace.update.stored_codes import StoredCodes, stored_codes
from headrace.update.wire import Wire

# Bytes of a weight where the configuration names no dtype.
_WEIGHT_BYTES = 2
# The number of steps for which wear is stated when the length of the run is not known.
DEFAULT_STEPS = 1000
# Forecasts that are only compared with one another may be coarse.
_COARSE_OPERATIONS = 1000
# They are finer for times that stand beside the plan's own.
_MOST_OPERATIONS = 2000
# A variant of a plan that fits is worth a line if it takes less than this share of the plan's time.
_WORTH_IT = 0.99
# Steps between two commits in the variant with few commits.
_SELDOM = 10
# How many placements of a variant are compared.
_MOST_PLACEMENTS = 4


def plan_model(
    model: str | Path,
    options: Options | None = None,
    *,
    here: bool = True,
    variants_seconds: float = 4.0,
    packed: PackedRows | None = None,
    between: Sequence[BesideSteps] = (),
) -> PlanReport:
    """Plan the training of `model` (a directory, a config.json, or OWNER/NAME on the Hub) under `options`.

    `options.machine` is the machine, by name or as measured ceilings; without it, times are those of a nominal machine, and the
    report says so. If SSD directories are named, only their drives count. `here` says that the plan is for this machine. Then
    missing budgets follow from what is free now. Otherwise only directories of this machine are looked at. `options.max_steps`
    is the length of the run, for hours and wear. If the model does not fit, the search for variants that do ends after about
    `variants_seconds`. If it fits and the SSDs limit the step, the alternatives are variants that use them less.
    `packed` are the rows with which the run begins, if they are known. `between` is what it does besides steps, untimed.

    Raises:
        ModelError: there is no configuration, or training refuses its architecture, which is tried on a tiny instance.
        InputError: lengths or budgets are impossible.
        StorageError: an SSD directory of the budget cannot be used.
    """
    options = options or Options()
    budget, machine, optimizer = options.budget, options.machine, optimizer_of(options)
    ceilings = load_profile(machine) if isinstance(machine, str) else machine
    config, whole = read_parts(model)
    checkpoint = None
    if getattr(config, "quantization_config", None) is not None:
        checkpoint = open_coded(model)
        config, whole = checkpoint.config, checkpoint.whole
    tokens, length = lengths_of(config, options)
    self_check(config)
    check_whole(config, whole)
    rule = rule_of(optimizer, options.compute_dtype).figures
    chain = Chain.from_config(config, options.compute_dtype, optimizer, rule.parameter_alignment)
    given = load_plan(Path(options.plan)) if options.plan else None
    if given is not None:
        chain.take_head_by(given.batch.head_rows)
    stored = stored_codes(chain, chain.attach(checkpoint), rule.planes) if checkpoint else StoredCodes()
    if ceilings is not None and budget.ssd:
        ceilings = ceilings.of_directories(file_systems(budget.ssd))
    place = Place.of(ceilings, here=here)
    allowance = place.allowance(
        budget,
        ssd_bytes=default_ssd_bytes(ceilings, budget.ssd, beside=_finished(model, options, chain) if here else None),
        import_workspace_bytes=import_workspace_bytes(chain.layouts),
        saves=options.saves,
    )
    if not allowance.device_overhead_bytes and not multiplies(options.compute_dtype, ceilings, here=here):
        chain.multiply_wide()
    lengths: dict[str, Any] = {"tokens_per_step": tokens, "sequence_length": length}
    question = Question.of(options, allowance, **lengths, packed=packed, offered_bytes=place.offered_bytes)
    workload, planner = question.workload, _ModelPlans(chain, stored, question, ceilings, here=here)
    question = planner.chosen(question)
    report = PlanReport(
        model=type(chain.model if whole is None else whole).__name__,
        parameters=chain.num_parameters,
        compute_dtype=options.compute_dtype,
        rule=rule.name,
        tokens_per_step=workload.tokens_per_step,
        sequence_length=workload.sequence_length,
        machine=planner.ceilings.name,
        measured=ceilings is not None,
        allowed_bytes=question.allowed_bytes,
        unused_tensors=chain.unused_tensors if checkpoint else None,
    )
    try:
        plan = planner.plan(question, given)
    except PlanInfeasible as error:
        return _unfit(report, error, question, planner, variants_seconds)
    more = (*([] if whole is None else [note_on(whole)]), *question.wire.of(chain).notes, *notes_on(planner.forms(question)))
    plan = plan.with_results(notes=(*plan.results.notes, *more))
    steps = options.max_steps or DEFAULT_STEPS
    report = _with_times(report, plan, planner.ceilings, planner.forecast(plan), steps, between)
    alternatives = (
        *planner.with_fewer_checkpoints(question, plan, report.forecast),
        *planner.sparing_the_ssd(question, plan, report.forecast),
    )
    return replace(report, alternatives=alternatives)


def _unfit(
    report: PlanReport, error: PlanInfeasible, question: Question, planner: "_ModelPlans", variants_seconds: float
) -> PlanReport:
    """Return the report of a model that does not fit, with the variants that do."""
    deadline = time.monotonic() + variants_seconds
    found = nearest_variants(question, error, planner.quick_plan, lambda: time.monotonic() > deadline)
    variants = tuple(planner.alternative(*variant) for variant in found)
    return replace(report, reason=str(error), needed_bytes={error.tier: error.needed_bytes}, alternatives=variants)


def report_of(
    plan: Plan, ceilings: Ceilings | None, *, model: str, num_steps: int, between: Sequence[BesideSteps] = ()
) -> PlanReport:
    """Return the report of a plan that a run already has: the same figures as `plan_model` gives for it.

    `ceilings` is the machine of the plan, None for a nominal one; `model` is a name for people. A node's plan has no times.
    """
    machine = ceilings or nominal_machine_of(plan)
    report = PlanReport(
        model=model,
        parameters=plan.num_parameters,
        compute_dtype=plan.compute_dtype,
        rule=plan.rule.name,
        tokens_per_step=plan.batch.tokens_per_step,
        sequence_length=plan.batch.sequence_length,
        machine=machine.name,
        measured=ceilings is not None,
        allowed_bytes=plan.results.allowed_bytes,
    )
    if plan.serves:
        return replace(report, plan=plan)
    return _with_times(report, plan, machine, forecast(plan, machine), num_steps, between)


def _with_times(
    report: PlanReport, plan: Plan, ceilings: Ceilings, found: Forecast, num_steps: int, between: Sequence[BesideSteps]
) -> PlanReport:
    written, seconds = found.ssd_bytes_written_per_step, found.step_seconds
    return replace(
        report,
        plan=plan,
        needed_bytes={tier: plan.peak(tier) for tier in plan.results.peak_bytes},
        forecast=found,
        endurance=endurance(ceilings.drives, written, num_steps=num_steps, step_seconds=seconds),
        doubled=_doubled(plan, ceilings, found),
        between=tuple(each.timed(plan, ceilings) for each in between),
    )


def lengths_of(config: Any, options: Options) -> tuple[int, int]:
    """Return tokens per step and sequence length, in tokens: as long as the model and the step allow, up to the default."""
    tokens, length = options.tokens_per_step, options.sequence_length
    if length is None:
        limits = (position_limit(config), tokens)
        length = min([DEFAULT_SEQUENCE_LENGTH, *(limit for limit in limits if limit is not None)])
    if length < 2:
        raise ConfigError(
            f"sequence_length: {length} given; a row needs at least 2 tokens, because each is predicted from earlier ones"
        )
    check_positions(config, length)
    return DEFAULT_ROWS_PER_STEP * length if tokens is None else tokens, length


def _finished(model: str | Path, options: Options, chain: Chain) -> Beside:
    """Return what a run will write at its end; where there are no weights yet, as many bytes as the parameters have."""
    try:
        num_bytes = export_bytes(Checkpoint.open(model, decode=True))
    except ModelError:
        num_bytes = chain.num_parameters * getattr(chain.config.dtype, "itemsize", _WEIGHT_BYTES)
    return Beside.models(options.models_at_once, Path(options.output or "runs") / "final", num_bytes)


class _ModelPlans:
    """Plans for one model, whose costs are profiled once for each micro-batch."""

    def __init__(self, chain: Chain, stored: StoredCodes, question: Question, ceilings: Ceilings | None, *, here: bool) -> None:
        self._chain, self._stored = chain, stored
        for_gpu = question.allowance.device_overhead_bytes > 0
        # Elsewhere, too, tensors will be allocated as the command tells the library, whatever this process was told.
        huge_pages = None if here or ceilings is None else True
        self._new_profiles = partial(Profiles, chain, for_gpu=for_gpu, huge_pages=huge_pages)
        self._profiles: dict[str, Profiles] = {}  # by the adapters that blocks compute with
        self._measured = ceilings
        # They only serve times: the choice depends on whether anybody measured, as it does in a run.
        self.ceilings = ceilings or nominal_ceilings(self._problem(question))
        self._seconds_of = StepSeconds(self.ceilings)

    def chosen(self, question: Question) -> Question:
        """Return the question with one of the wires that its own leaves open."""
        choices = question.wire.choices(self._chain.layouts[1 : self._chain.num_blocks + 1])
        questions = [replace(question, wire=choice) for choice in choices]
        return next((each for each in questions[:-1] if holds_states(self._problem(each))), questions[-1])

    def plan(self, question: Question, given: Plan | None = None) -> Plan:
        """Return the plan for `question`; a `given` one is followed, as a run does.

        Raises:
            ConfigError: the given plan is for another run.
            PlanInfeasible: memory or SSD space is too small.
        """
        problem = self._problem(question)
        return adopted(given, problem) if given else make_plan(problem, self._measured, self._seconds_of)

    def forecast(self, plan: Plan) -> Forecast:
        """Return the forecast of a plan on the machine for which it was made."""
        return self._seconds_of.forecast(plan)

    def quick_plan(self, question: Question) -> Plan:
        """Return a plan for `question` without searching for what to replay: one that fits, not the fastest.

        Raises:
            PlanInfeasible: memory or SSD space is too small.
        """
        problem = self._problem(question)
        policy = problem.policies[0]
        choices = (choice for thrift in THRIFTS for choice in placements_of(problem, policy, thrift))
        fitting = (plan for plan in (plan_of(problem, choice) for choice in choices) if plan.fits)
        chosen = [filled(problem, plan) for plan in islice(fitting, _MOST_PLACEMENTS)]
        if not chosen:
            return self.plan(question)  # this says why nothing fits
        return min(chosen, key=lambda plan: self._seconds_of(plan, _COARSE_OPERATIONS)) if len(chosen) > 1 else chosen[0]

    def forms(self, question: Question) -> tuple[Form, ...]:
        """Return the forms of the model's units."""
        rule = rule_of(question.optimizer, self._chain.compute_dtype).figures
        layouts = [realigned(layout, rule.parameter_alignment) for layout in self._chain.layouts]
        wire = question.wire.of(self._chain)
        coding = Coding(stored=self._stored, on_host=not question.allowance.device_overhead_bytes)
        return forms_under(layouts, self._chain.num_blocks, wire, rule, question.optimizer, coding)

    def _costs(self, wire: Wire, sequences: int, length: int) -> ModelCosts:
        """Return what micro-batches cost; if `wire` is one of adapters, blocks compute with them."""
        adapters = wire.of(self._chain).adapters
        profiles = self._profiles.setdefault(wire.name if adapters else "", self._new_profiles())
        with self._chain.adapted(adapters):
            return profiles.of(sequences, length)

    def _problem(self, question: Question) -> Problem:
        rule, forms = rule_of(question.optimizer, self._chain.compute_dtype).figures, self.forms(question)
        own = rule_of(question.optimizer, "float32").figures if any(form.has_own_family for form in forms) else None
        if own:
            question.wire.refuse(question.optimizer)
        costs_of = partial(self._costs, question.wire, length=question.workload.sequence_length)
        return question.problem(forms, costs_of, rule, own)

    def with_fewer_checkpoints(self, question: Question, plan: Plan, found: Forecast | None) -> tuple[Alternative, ...]:
        """Return the variant of a plan with few commits, if it is faster. Commits write the states that live in memory. A step
        whose updates wait may have such states.
        """
        if found is None or plan.updates.checkpoint_every > 1:
            return ()
        problem, every = self._problem(question), plan.updated_units
        costs = problem.costs_of(plan.batch.micro_batch_sequences)
        best: Alternative | None = None
        for held in ("host", "ssd"):
            bare = plan.with_results(speculation=None)
            waiting = bare.with_updates(policy="deferred", late_units=every, checkpoint_every=_SELDOM, resident_states=())
            least = min(plan.num_blocks, max(2, plan.prefetch + 1))
            waiting = replace(waiting.with_gradients(held=held), host_slots=least)
            waiting = with_footprint(waiting, costs, problem.allowance)
            if not waiting.fits:
                continue
            full = filled(problem, waiting)
            times = found.step_seconds / self._seconds_of(full, _MOST_OPERATIONS)
            words = f"lose at most {_SELDOM} steps at a crash, {plain_figure(times)} times as fast"
            options = {"checkpoint_every": _SELDOM}
            made = self.alternative(words, options, full, most_operations=_MOST_OPERATIONS)
            if best is None or made.step_seconds < best.step_seconds:
                best = made
        return () if best is None or best.step_seconds >= _WORTH_IT * found.step_seconds else (best,)

    def sparing_the_ssd(self, question: Question, plan: Plan, found: Forecast | None) -> tuple[Alternative, ...]:
        """Return those variants of a plan that move fewer bytes over the SSDs, which limit its step, if they are faster.

        The plan stays as it is but for one change: weights that stay in host memory, or smaller states. If subspaces are
        trained in place of whole matrices, or by another rule, it is another plan.
        """
        if found is None or found.bottleneck not in (Lane.SSD_READ, Lane.SSD_WRITE):
            return ()
        variants = [*self._weights_in_host_memory(question, plan), *self._smaller_states(question, plan)]
        for words, options, other in (*other_wires(question), *other_rules(question)):
            with suppress(PlanInfeasible, ConfigError):  # some ways cannot train this model
                variants.append((words, options, self.quick_plan(other)))
        made = (self.alternative(*variant, most_operations=_MOST_OPERATIONS) for variant in variants)
        return tuple(each for each in made if each.step_seconds < _WORTH_IT * found.step_seconds)

    def _weights_in_host_memory(self, question: Question, plan: Plan) -> Iterator[Variant]:
        if plan.host_slots < plan.num_blocks:
            problem = self._problem(question)
            roomy = with_footprint(
                replace(plan, host_slots=plan.num_blocks), problem.costs_of(plan.batch.micro_batch_sequences), problem.allowance
            )
            needed_bytes = round_up(roomy.peak("host"), GIB if roomy.peak("host") > 4 * GIB else MIB)
            if not question.may_ask_for("host", needed_bytes):
                return
            yield f"all weights in host memory, {format_bytes(needed_bytes)} of it", {"host_memory": needed_bytes}, roomy

    def _smaller_states(self, question: Question, plan: Plan) -> Iterator[Variant]:
        for change, options, other in smaller_states(question):
            problem = self._problem(other)
            changed = replace(plan, rule=problem.rule, own_rule=problem.own_rule, units=problem.units)
            changed = changed.with_updates(resident_states=())
            changed = with_footprint(changed, problem.costs_of(plan.batch.micro_batch_sequences), problem.allowance)
            if changed.fits:
                yield change, options, filled(problem, changed)

    def alternative(
        self, change: str, options: dict[str, Any], plan: Plan, *, most_operations: int = _COARSE_OPERATIONS
    ) -> Alternative:
        """Return a variant of a plan with its times."""
        step_seconds = self._seconds_of(plan, most_operations)
        written = self._seconds_of.forecast(plan).ssd_bytes_written_per_step
        return Alternative(
            ssd_bytes_written_per_step=written,
            change=change,
            options=options,
            step_seconds=step_seconds,
            tokens_per_second=plan.batch.tokens_per_step / step_seconds,
            peak_bytes={tier: plan.peak(tier) for tier in plan.results.peak_bytes},
        )


def _doubled(plan: Plan, ceilings: Ceilings, found: Forecast) -> dict[str, float]:
    """Return the seconds per step with twice of each part of the machine that the step keeps busy, the busiest part first."""
    coarse = forecast(plan, ceilings, most_operations=_COARSE_OPERATIONS).step_seconds
    shares: dict[Part, float] = {}
    for lane in Lane:
        if part := lane.row.part:
            shares[part] = max(shares.get(part, 0.0), found.utilisation[lane])
    times = {}
    for part, share in sorted(shares.items(), key=lambda pair: -pair[1]):
        if share > 0.2:  # below this, other parts hide it entirely
            faster = forecast(plan, ceilings.with_twice(part), most_operations=_COARSE_OPERATIONS).step_seconds
            # Coarse forecasts only give the ratio.
            times[part.name] = found.step_seconds * min(1.0, faster / coarse)
    return times
