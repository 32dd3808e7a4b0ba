"""`headrace plan` and `headrace bench machine`: what would happen, and what this machine can do.

Invariant: only this module decides where a profile is kept; a plan without `--machine` is for this machine.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.ask.answer import plan_model
from headrace.ask.between_steps import BesideSteps, Pacing
from headrace.ask.local_rounds import LocalReport
from headrace.ask.plan_report import PlanReport
from headrace.cli.first_look import is_gguf, model_here
from headrace.cli.screen import say, tell
from headrace.files.model_directory import refuse_no_configuration
from headrace.measure.kept import Wanted, alone, find_kept
from headrace.peers import plan_ranks, plan_stages, plan_which, plan_workers
from headrace.plan.clock.machine_profiles import load_profile, with_changes
from headrace.plan.search.given import lengths_in_plan
from headrace.process import cache_directory, machine_profile_path
from headrace.terms.errors import ConfigError, StorageError
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.machine.drives import Drive
from headrace.terms.options.border import usual_border
from headrace.terms.options.compress_options import CompressOptions
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.options.plan_options import MACHINE_CHANGES, PlanOptions
from headrace.terms.packed_rows import PackedRows
from headrace.terms.plain_figures import plain_figure
from headrace.terms.sizes import format_bytes, format_seconds
from headrace.terms.tables import Report
from headrace.update.wires.going_on import going_on

if TYPE_CHECKING:
    from headrace.generate.plan.plan import GenerationPlan

# The longest wait for another process that measures: most take less.
_WAIT_SECONDS = 100.0
# Which options of `plan` the plans of generation and of compression use. Data count only if passes do, and not at a node.
_OF_GENERATION = frozenset((*MACHINE_CHANGES, *(each.key for each in GenerateOptions.declarations() if each.plan)))
_OF_COMPRESSION = frozenset((*MACHINE_CHANGES, "machine", "host_memory", "sequence_length"))
_OF_EVALUATIONS = frozenset(("eval_split", "eval_data", "eval_steps"))
_OF_SAVING = frozenset(("save_steps", "save_total_limit"))
_OF_DATA = frozenset(("epochs", "packing", "border", "cache", *_OF_EVALUATIONS))
_OF_ONE_MACHINE = frozenset(("checkpoint_every", "output", "plan", "load_best_model_at_end", *_OF_SAVING, *_OF_EVALUATIONS))


@dataclass(frozen=True, kw_only=True)
class GenerationAsked:
    """A generation to plan: prompts, and the tokens of each and of its answer."""

    prompts: int
    prompt_length: int
    new_tokens: int


def answer_plan(
    options: PlanOptions, given: Collection[str], generation: GenerationAsked | None, compress: str | None
) -> dict[str, str]:
    """Return what `headrace plan` says: `json`, the `whole` as text, and that in `brief`.

    With `generation` or `compress` it is the plan of these. `given` are the keys that were set; those that change nothing are
    named at the end.

    Raises:
        InputError: model, data, machine or a number cannot be used.
        StorageError: an SSD directory cannot be used.
        PlanInfeasible: a generation does not fit.
    """
    if is_gguf(options.model):
        options = replace(options, model=model_here(options.model))
    if changes := {key: getattr(options, key) for key in MACHINE_CHANGES if getattr(options, key) is not None}:
        assert options.machine is not None, "options refuse changes of nothing"
        machine = load_profile(options.machine) if isinstance(options.machine, str) else options.machine
        options = replace(options, machine=with_changes(machine, changes))
    report: Report | GenerationPlan
    if generation is not None:
        acting, report = _OF_GENERATION, _generation(options, given, generation, compress)
    elif compress is not None:
        acting, report = _of_compression(options), _compression(options, compress)
    else:
        acting, report = _of_training(options), make_report(options)
        if options.html is not None:
            _draw(report, options)
    idle = sorted(set(given) - acting)
    lines = [f"{'no effect':<10}on the plan: {', '.join(idle)}"] if idle else []
    return {
        "json": json.dumps(report.to_json() | {"without_effect": idle}, indent=2),
        "whole": "\n".join((report.explain(), *lines)),
        "brief": "\n".join((report.brief(), *lines)),
    }


def _draw(report: "Report", options: PlanOptions) -> None:
    """Write the plan as a page.

    Raises:
        ConfigError: nothing fits, the plan is one of several machines, or the file cannot be written.
    """
    from headrace.apps import write_plan_page  # late: other plans do without it

    if not isinstance(report, PlanReport):
        raise ConfigError("html: the plan of one machine is drawn; leave html, or workers, ranks, stages and local_steps out")
    if report.plan is None:
        raise ConfigError("html: nothing fits, so there is no plan to draw; leave html out to see what is lacking")
    assert options.html is not None, "it was asked"
    path = write_plan_page(options.html, options.model.name, report.plan, report.forecast, report.doubled)
    tell(f"wrote {path}")


def make_report(options: PlanOptions) -> Report:
    """Return the plan of a training. With data, and no number of steps, the run is as long as its passes over the data.

    Raises:
        InputError: model, data, machine or a number cannot be used.
        StorageError: an SSD directory cannot be used.
    """
    here, model = options.machine is None, str(options.model)
    tokens, length = lengths_in_plan(options.plan, options.tokens_per_step, options.sequence_length)
    changes: dict[str, Any] = {"tokens_per_step": tokens, "sequence_length": length, "adapter": going_on(options.adapter)}
    asked_ssd = not here or bool(options.ssd)
    if here:
        ssd = options.budget.ssd or (Path.cwd(),)
        changes |= {"ssd": ssd, "machine": _measured_machine(ssd, options.compute_dtype)}
    options = replace(options, **changes)
    compares = options.link is not None and (options.workers, options.ranks, options.stages) == (None,) * 3
    if (options.local_steps is not None or compares) and isinstance(options.machine, str):
        options = replace(options, machine=load_profile(options.machine))
    packed, between = None, list[BesideSteps]()
    if _reads_data(options):
        options, packed, between = _of_its_passes(options)
    else:
        between.extend(Pacing.asked(options.max_write_per_day))
        if options.saves:
            from headrace.runs.checkpoints import keeping_of  # late: it brings the data libraries

            between.append(keeping_of(options))
    if options.workers is not None:
        return plan_workers(model, options, here=here)
    if options.ranks is not None:
        return plan_ranks(model, options, here=here, packed=packed, between=between)
    if options.stages is not None:
        return plan_stages(model, options, here=here, asked_ssd=asked_ssd)
    if compares and options.local_steps is None:
        return plan_which(model, options, here=here)
    report = plan_model(model, options, here=here, packed=packed, between=between)
    return report if options.local_steps is None else LocalReport.of(report, options)


def _generation(options: PlanOptions, given: Collection[str], asked: GenerationAsked, compress: str | None) -> "GenerationPlan":
    from headrace.generate.passes.asked import plan_generation  # late: plans of training do without it

    own_keys = _OF_GENERATION.intersection(given) - set(MACHINE_CHANGES)
    own = GenerateOptions.of({key: getattr(options, key) for key in own_keys})
    here, machine = own.machine is None, own.machine
    if here:
        machine = _measured_machine(options.budget.ssd, options.compute_dtype)
    ceilings = load_profile(machine) if isinstance(machine, str) else machine
    return plan_generation(str(options.model), own, ceilings, here=here, compress=compress, say_instead=True, **vars(asked))


def _compression(options: PlanOptions, code: str) -> Report:
    from headrace.compress.planner import plan_compression  # late: plans of training do without it

    machine, dtype = options.machine, CompressOptions.compute_dtype
    if machine is None:
        machine = _measured_machine(options.budget.ssd or (Path.cwd(),), dtype)
    here, row_tokens = options.machine is None, options.sequence_length
    return plan_compression(str(options.model), code, machine, row_tokens=row_tokens, here=here, budget=options.budget)


def _of_compression(options: PlanOptions) -> frozenset[str]:
    """Return the keys that can change a plan of compression; drives count where they choose among what runs measured."""
    by_drives = options.machine is None and not machine_profile_path().exists()
    return _OF_COMPRESSION | {"ssd"} if by_drives else _OF_COMPRESSION


def _of_training(options: PlanOptions) -> frozenset[str]:
    """Return the keys that can change a plan of training."""
    acting = {each.key for each in PlanOptions.declarations() if each.plan}
    acting = acting - _OF_ONE_MACHINE if options.workers is not None else acting
    acting = acting if options.evaluates else acting - _OF_EVALUATIONS
    if not _reads_data(options):
        return frozenset(acting - _OF_DATA)
    return frozenset(acting | {"data"}) - (frozenset() if options.max_steps is None else {"epochs"})


def _reads_data(options: PlanOptions) -> bool:
    evaluates = options.evaluates and options.workers is None
    return bool(options.data) and (options.max_steps is None or evaluates)


def measure_this_machine(directories: Sequence[Path], output: Path | None, *, seconds: float, as_json: bool) -> str:
    """Measure this machine, write its profile to `output` (default: where `plan` looks), and return what to print.

    Raises:
        StorageError: a directory cannot be measured, or the profile cannot be written.
    """
    from headrace.measure.machine import measure_machine  # late: a plan does without it

    path = output or machine_profile_path()
    with alone(_WAIT_SECONDS) as first:
        if not first:
            tell("another process measures this machine, too: both get lower figures")
        ceilings = measure_machine(tuple(directories) or (Path.cwd(),), seconds_budget=seconds, sink=say)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(ceilings.to_json(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}); name another --output") from error
    return json.dumps(ceilings.to_json(), indent=2) if as_json else f"{ceilings_text(ceilings)}\nwritten   {path}"


def ceilings_text(ceilings: Ceilings) -> str:
    """Return a profile as lines for people."""
    rates: list[tuple[str, float | None]] = [
        ("host to device", ceilings.host_to_device_bytes_per_second),
        ("device to host", ceilings.device_to_host_bytes_per_second),
        ("both at once", ceilings.both_ways_bytes_per_second),
        ("host memory", ceilings.host_memory_bytes_per_second),
        ("update", ceilings.update_bytes_per_second),
        ("update, one core", ceilings.update_bytes_per_second_per_core),
        ("keys and values", ceilings.attended_bytes_per_second),
        ("weights for a row", ceilings.row_product_bytes_per_second),
        ("device memory", ceilings.device_memory_bytes_per_second),
    ]
    for index, drive in enumerate(ceilings.drives):
        moved = (drive.read_bytes_per_second, drive.write_bytes_per_second, drive.mixed_bytes_per_second)
        rates += [(f"ssd {index} {way}", rate) for way, rate in zip(("read", "write", "both"), moved, strict=True)]
    overheads = (
        ("an operation", ceilings.launch_seconds),
        ("an operator", ceilings.operator_seconds),
        ("a turn", ceilings.turn_seconds),
        ("a transfer", ceilings.transfer_seconds),
        ("a commit", ceilings.commit_seconds),
    )
    lines = [f"machine   {ceilings.name}, {format_bytes(ceilings.host_memory_bytes)} of memory"]
    lines += [f"{dtype:<18} {plain_figure(rate / 1e12):>8} TFLOP/s" for dtype, rate in ceilings.flops_per_second.items()]
    if ceilings.attention_share < 1:
        lines.append(f"{'attention':<18} {ceilings.attention_share:8.0%} of that")
    for name, seconds in (
        ("an activation", ceilings.hidden_seconds),
        ("a logit", ceilings.logit_seconds),
        ("a weight of the head", ceilings.head_seconds),
    ):
        if seconds:
            lines.append(f"{name:<18} {seconds * 1e9:8.3g} ns besides")
    if not ceilings.has_device:
        lines.append(f"{'on fresh pages':<18} {ceilings.fresh_pages_share:8.0%} of that")
    lines += [f"{name:<18} {plain_figure(rate / 1e9):>8} GB/s" for name, rate in rates if rate is not None]
    lines += [f"{name:<18} {_duration(seconds):>8}" for name, seconds in overheads]
    lines += [line for index, drive in enumerate(ceilings.drives) for line in _drive_lines(index, drive)]
    for lane, others in ceilings.slowdowns.items():
        lines.append(f"{lane} keeps " + ", ".join(f"{share:.0%} beside {other}" for other, share in others.items()))
    return "\n".join(lines)


def _drive_lines(index: int, drive: Drive) -> Iterator[str]:
    """Yield what is known about a drive besides its rates: CPU time, and how the engine keeps it busy."""
    if drive.io_cpu_seconds_per_gigabyte is not None:
        yield f"{f'ssd {index} CPU':<18} {drive.io_cpu_seconds_per_gigabyte:8.3g} s/GB"
    if drive.is_tuned:
        threads, piece = drive.in_flight.threads, format_bytes(drive.in_flight.piece_bytes)
        yield f"{f'ssd {index} in flight':<18} {threads:8d} each way, in pieces of {piece}"


def _measured_machine(ssd: tuple[Path, ...], compute_dtype: str) -> Ceilings | None:
    """Return the profile of this machine, or what a run measured of it with drives `ssd`; None if there is none."""
    profile = machine_profile_path()
    if profile.exists():
        return load_profile(profile)
    return find_kept(cache_directory(), Wanted(directories=ssd, compute_dtype=compute_dtype))


def _of_its_passes(options: PlanOptions) -> tuple[PlanOptions, PackedRows, list[BesideSteps]]:
    """Return the options with tokens per step, sequence length and the steps of the passes over the data, as in training.
    Besides, return the rows with which these begin, and what the run does besides steps.
    """
    from headrace.data.batches.open_data import total_steps, with_lengths  # late: it brings the data libraries
    from headrace.runs.checkpoints import Checkpoints
    from headrace.runs.evaluating import Evaluations
    from headrace.runs.open_rows import open_rows

    refuse_no_configuration(str(options.model))
    if not options.model.is_dir():
        raise ConfigError(f"data: the steps of a pass need the model's tokenizer, and {options.model} is no model directory")
    options = with_lengths(replace(options, border=options.border or usual_border(options.loss)))
    stream = open_rows(options)
    steps = total_steps(options.max_steps, options.epochs, stream)
    between = Checkpoints(options, Evaluations(options, stream, steps)).between_steps()
    return replace(options, max_steps=steps), stream.first_rows(steps), between


def _duration(seconds: float) -> str:
    return (
        f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2g} ms" if seconds < 1 else format_seconds(seconds)
    )
