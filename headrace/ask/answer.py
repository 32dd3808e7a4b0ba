"""Does a model fit, how fast does it train, what limits it, and what else would fit? Answered from shapes and a machine
profile.

Invariant: the placement is `make_plan`'s and the times are the simulator's, as for a run; nothing else is estimated.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.ask.between_steps import BesideSteps
from headrace.ask.model_config import as_decoded, check_positions, open_coded, position_limit, read_parts
from headrace.ask.model_plans import COARSE_OPERATIONS, ModelPlans
from headrace.ask.place import RunPlace, multiplies
from headrace.ask.plan_report import PlanReport
from headrace.ask.question import Question
from headrace.ask.variants import nearest_variants
from headrace.files import Beside, default_ssd_bytes, file_systems
from headrace.files.model_directory import has_weights
from headrace.losses.router import note_router_loss, with_router_loss
from headrace.model import Chain, Checkpoint, check_whole, export_bytes, import_workspace_bytes, note_on, self_check
from headrace.model.by_rows.block_tables import block_tables_of, is_large, take_tables, trained_tables_of
from headrace.plan.clock.endurance import endurance
from headrace.plan.clock.machine_profiles import load_profile
from headrace.plan.forecast.forecast import Forecast, forecast
from headrace.plan.schedules.ranks import sharers_on
from headrace.plan.search.given import load_plan
from headrace.plan.search.search import nominal_machine_of
from headrace.plan.value.plan import Plan
from headrace.terms.errors import ConfigError, ModelError, PlanInfeasible
from headrace.terms.lanes import Hardware, Lane
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.optimizer import ALL
from headrace.terms.options.options import DEFAULT_ROWS_PER_STEP, DEFAULT_SEQUENCE_LENGTH, Options
from headrace.terms.options.plan_options import PlanOptions
from headrace.terms.packed_rows import PackedRows
from headrace.terms.rule_figures import RuleFigures
from headrace.update import optimizer_of, rule_of
from headrace.update.wires import wire_of
from headrace.update.wires.forms import notes_on
from headrace.update.wires.rows import RowsWire
from headrace.update.wires.stored_codes import StoredCodes, stored_codes

# Bytes of a weight where the configuration names no dtype.
_WEIGHT_BYTES = 2
# The number of steps for which wear is stated when the length of the run is not known.
DEFAULT_STEPS = 1000


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
    given = load_plan(Path(options.plan)) if options.plan else None
    opened = open_question(model, options, here=here, packed=packed, head_rows=given.batch.head_rows if given else None)
    planner, question, report = opened.planner, opened.question, opened.report
    try:
        plan = planner.plan(question, given)
    except PlanInfeasible as error:
        return _unfit(report, error, question, planner, variants_seconds)
    question = planner.answered(question, plan)
    more = (*opened.notes, *question.wire.of(opened.chain).notes, *notes_on(planner.forms(question)))
    plan = plan.with_results(notes=(*plan.results.notes, *more))
    steps = options.max_steps or DEFAULT_STEPS
    report = _with_times(report, plan, planner.ceilings, planner.forecast(plan), steps, between)
    fewer = planner.with_fewer_checkpoints(question, plan, report.forecast)
    return replace(report, alternatives=(*fewer, *planner.sparing_the_ssd(question, plan, report.forecast)))


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What is asked of a model and a machine: the `question`, who plans for it, and a `report` without an answer."""

    chain: Chain
    planner: ModelPlans
    question: Question
    report: PlanReport
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ShapesToTrain:
    """A model as it is trained, without weights: its `chain`, the `rule`, and the begin of a report on any training of it."""

    chain: Chain
    rule: RuleFigures
    asked: dict[str, Any]

    @classmethod
    def of(cls, config: Any, whole: Any | None, options: Options) -> "ShapesToTrain":
        """Return the shapes of the model of a configuration, whose architecture is tried. Raises as `plan_model`."""
        tokens, length = step_lengths_of(config, options)
        config = with_router_loss(config, options)
        self_check(config)
        check_whole(config, whole)
        optimizer = optimizer_of(options)
        rule = rule_of(optimizer, options.compute_dtype).figures
        chain = Chain.from_config(config, options.compute_dtype, optimizer, rule.parameter_alignment)
        note_router_loss(chain, options)
        asked = {
            "model": type(chain.model if whole is None else whole).__name__,
            "parameters": chain.num_parameters,
            "compute_dtype": options.compute_dtype,
            "rule": rule.name,
            "tokens_per_step": tokens,
            "sequence_length": length,
        }
        return cls(chain=chain, rule=rule, asked=asked)

    @property
    def lengths(self) -> dict[str, Any]:
        """Tokens per step and sequence length."""
        return {name: self.asked[name] for name in ("tokens_per_step", "sequence_length")}


def open_question(
    model: str | Path, options: Options, *, here: bool, packed: PackedRows | None = None, head_rows: int | None = None
) -> Opened:
    """Open `model` on the machine of `options`; `head_rows` of the head are taken at a time if a plan says so. Raises as
    `plan_model`.
    """
    budget, machine = options.budget, options.machine
    ceilings = load_profile(machine) if isinstance(machine, str) else machine
    config, whole = read_parts(model)
    checkpoint, notes = None, list[str]()
    if getattr(config, "quantization_config", None) is not None:
        if _trains_all(options) and not has_weights(model):
            notes.append(as_decoded(config))
        else:
            checkpoint = open_coded(model)
            config, whole = checkpoint.config, checkpoint.whole
    notes += [] if whole is None else [note_on(whole)]
    shapes = ShapesToTrain.of(config, whole, options)
    chain = shapes.chain
    if head_rows is not None:
        chain.take_head_by(head_rows)
    weights = chain.attach(checkpoint) if checkpoint else None
    if not _trains_all(options) and wire_of(options).is_beside:
        take_tables(chain, [table for table in block_tables_of(chain, weights) if is_large(table)])
    elif isinstance(wire_of(options), RowsWire):
        take_tables(chain, trained_tables_of(chain, weights))
    stored = stored_codes(chain, weights, shapes.rule.planes) if weights else StoredCodes()
    if ceilings is not None and budget.ssd:
        ceilings = ceilings.of_directories(file_systems(budget.ssd))
    narrow = multiplies(options.compute_dtype, ceilings, here=here)
    place = RunPlace.of(ceilings, here=here).keeping(chain, narrow=narrow)
    allowance = place.allowance(
        budget,
        ssd_bytes=default_ssd_bytes(ceilings, budget.ssd, beside=_finished(model, options, chain) if here else None),
        import_workspace_bytes=import_workspace_bytes(chain.layouts),
        saves=options.saves,
        sharers=sharers_on(ceilings) if ceilings is not None else 1,
    )
    if not (allowance.device_overhead_bytes or narrow):
        chain.multiply_wide()
    question = Question.of(options, allowance, **shapes.lengths, packed=packed, offered_bytes=place.offered_bytes)
    planner = ModelPlans(chain, stored, question, ceilings, here=here, weights=weights)
    question = planner.chosen(question)
    report = PlanReport(
        **shapes.asked,
        machine=planner.ceilings.name,
        measured=ceilings is not None,
        allowed_bytes=question.allowed_bytes,
        unused_tensors=chain.unused_tensors if checkpoint else None,
    )
    return Opened(chain=chain, planner=planner, question=question, report=report, notes=tuple(notes))


def _trains_all(options: Options) -> bool:
    """Return whether no weight stays as its file has it, so that nothing depends on how small codes make the file."""
    return options.adapter is None and options.gradient.partition(":")[0] in ("dense", "rows") and options.train == ALL


def _unfit(
    report: PlanReport, error: PlanInfeasible, question: Question, planner: "ModelPlans", variants_seconds: float
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
    written = found.ssd_bytes_written_per_step
    seconds = max(found.step_seconds, *(each.spacing_seconds(written) for each in between), 0.0)
    return replace(
        report,
        plan=plan,
        needed_bytes={tier: plan.peak(tier) for tier in plan.results.peak_bytes},
        forecast=found,
        endurance=endurance(ceilings.drives, written, num_steps=num_steps, step_seconds=seconds),
        doubled=_doubled(plan, ceilings, found),
        between=tuple(each.timed(plan, ceilings) for each in between),
    )


def step_lengths_of(config: Any, options: Options) -> tuple[int, int]:
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


def machine_of(options: PlanOptions, key: str) -> Ceilings:
    """Return the machine that a plan by the option `key` is for.

    Raises:
        ConfigError: there is none.
    """
    if options.machine is None:
        raise ConfigError(
            f"{key}: a plan needs the machine; name it with --machine, such as rtx4090, or measure this one with "
            "`headrace bench machine`"
        )
    return load_profile(options.machine) if isinstance(options.machine, str) else options.machine


def rows_of_each(tokens: int, length: int, count: int, who: str) -> int:
    """Return the rows of a step that the one with most has, where `count` of `who` share out a step of so many tokens.

    Raises:
        ConfigError: there are not enough.
    """
    if tokens // length < count:
        raise ConfigError(
            f"tokens_per_step: {tokens} are {tokens // length} rows of {length} for {count} {who}; each takes whole rows: "
            f"give {count * length} at least"
        )
    return -(-(tokens // length) // count)


def _finished(model: str | Path, options: Options, chain: Chain) -> Beside:
    """Return what a run will write at its end; where there are no weights yet, as many bytes as the parameters have."""
    try:
        num_bytes = export_bytes(Checkpoint.open(model, decode=True))
    except ModelError:
        num_bytes = chain.num_parameters * getattr(chain.config.dtype, "itemsize", _WEIGHT_BYTES)
    return Beside.models(options.models_at_once, Path(options.output or "runs") / "final", num_bytes)


def _doubled(plan: Plan, ceilings: Ceilings, found: Forecast) -> dict[str, float]:
    """Return the seconds per step with twice of each part of the machine that the step keeps busy, the busiest part first."""
    coarse = forecast(plan, ceilings, most_operations=COARSE_OPERATIONS).step_seconds
    shares: dict[Hardware, float] = {}
    for lane in Lane:
        if (part := lane.row.part) and (ceilings.has_device or part is not Lane.HOST_TO_DEVICE.row.part):
            shares[part] = max(shares.get(part, 0.0), found.utilisation[lane])
    times = {}
    for part, share in sorted(shares.items(), key=lambda pair: -pair[1]):
        if share > 0.2:  # below this, other parts hide it entirely
            faster = forecast(plan, ceilings.with_twice(part), most_operations=COARSE_OPERATIONS).step_seconds
            # Coarse forecasts only give the ratio.
            times[part.name] = found.step_seconds * min(1.0, faster / coarse)
    return times
