"""`headrace plan` and `headrace bench machine`: what would happen, and what this machine can do.

Invariant: only this module decides where a profile is kept; a plan without `--machine` is for this machine.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.ask.answer import plan_model
from headrace.ask.cluster import plan_cluster
from headrace.ask.cluster_report import ClusterReport, explain_cluster
from headrace.ask.explain import explain
from headrace.ask.plan_report import PlanReport
from headrace.cli.environment import cache_directory, machine_profile_path
from headrace.measure.kept import Wanted, alone, find_kept
from headrace.plan.machine_profiles import load_profile
from headrace.terms.ceilings import Ceilings
from headrace.terms.drives import Drive
from headrace.terms.errors import ConfigError, StorageError
from headrace.terms.events import Event, Notice
from headrace.terms.generate_options import GenerateOptions
from headrace.terms.options import Options, PlanOptions
from headrace.terms.plain_figures import plain_figure
from headrace.terms.run_options import RunOptions
from headrace.terms.sizes import format_bytes, format_seconds

# The longest wait for another process that measures: most take less.
_WAIT_SECONDS = 100.0


def make_report(model: str, options: PlanOptions, data: Sequence[Path]) -> PlanReport | ClusterReport:
    """Return the answer for `headrace plan`'s options. With `data`, the length of the run is one pass over it.

    Raises:
        InputError: model, data, machine or a number cannot be used.
        StorageError: an SSD directory cannot be used.
    """
    here = options.machine is None
    if here:
        options = replace(options, ssd=options.ssd or (Path.cwd(),))
        options = replace(options, machine=_measured_machine(options))
    if data and options.max_steps is None:
        options = _of_one_epoch(Path(model), data, options)
    return plan_model(model, options, here=here) if options.workers is None else plan_cluster(model, options, here=here)


def generation_report(
    model: str,
    given: Mapping[str, Any],
    prompts: int,
    prompt_length: int,
    new_tokens: int,
    compress: str | None,
    *,
    as_json: bool,
) -> str:
    """Return the plan of a generation as text or JSON, with `compress` of what the model would be compressed to.

    Those options of training that generation also has count, too.

    Raises:
        InputError, PlanInfeasible: see `plan_generation`.
    """
    from headrace.generate.planner import plan_generation  # late: plans of training do without it

    known = frozenset(GenerateOptions.keys())
    options = GenerateOptions.of({key: value for key, value in given.items() if key in known})
    here, machine = options.machine is None, options.machine
    if here:
        machine = _measured_machine(PlanOptions.of(given))
    ceilings = load_profile(machine) if isinstance(machine, str) else machine
    asked: dict[str, Any] = {"prompts": prompts, "prompt_length": prompt_length, "new_tokens": new_tokens}
    plan = plan_generation(model, options, ceilings, here=here, compress=compress, **asked)
    return json.dumps(plan.to_json(), indent=2) if as_json else plan.explain()


def compression_report(model: str, code: str, given: Mapping[str, Any], *, as_json: bool) -> str:
    """Return the plan of a compression to `code` as text or JSON, for `machine`, else for this one, a nominal one of its
    size if it was not measured.

    Raises:
        InputError: model, code or machine cannot be used.
    """
    from headrace.compress.planner import plan_compression  # late: plans of training do without it

    options = PlanOptions.of(given)
    machine = options.machine or _measured_machine(replace(options, ssd=options.ssd or (Path.cwd(),)))
    report = plan_compression(model, code, machine)
    return json.dumps(report.to_json(), indent=2) if as_json else report.explain()


def report_text(report: PlanReport | ClusterReport, *, as_json: bool) -> str:
    """Return the report as JSON or as the table."""
    if as_json:
        return json.dumps(report.to_json(), indent=2)
    return explain(report) if isinstance(report, PlanReport) else explain_cluster(report)


def bench_machine(directories: Sequence[Path], output: Path | None, *, seconds: float, as_json: bool) -> str:
    """Measure this machine, write its profile to `output` (default: where `plan` looks), and return what to print.

    Raises:
        StorageError: a directory cannot be measured, or the profile cannot be written.
    """
    from headrace.measure.machine import measure_machine  # late: a plan does without it

    path = output or machine_profile_path()
    with alone(_WAIT_SECONDS) as first:
        if not first:
            _say(Notice(text="another process measures this machine, too: both find less than there is"))
        ceilings = measure_machine(tuple(directories) or (Path.cwd(),), seconds_budget=seconds, sink=_say)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(ceilings.to_json(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}); name another --output") from error
    return json.dumps(ceilings.to_json(), indent=2) if as_json else f"{ceilings_text(ceilings)}\nwritten   {path}"


def ceilings_text(ceilings: Ceilings) -> str:
    """Return a profile as lines for people."""
    rates = [
        ("host to device", ceilings.host_to_device_bytes_per_second),
        ("device to host", ceilings.device_to_host_bytes_per_second),
        ("both at once", ceilings.both_ways_bytes_per_second),
        ("host memory", ceilings.host_memory_bytes_per_second),
        ("update", ceilings.update_bytes_per_second),
        ("update, one core", ceilings.update_bytes_per_second_per_core),
    ]
    if ceilings.attended_bytes_per_second is not None:
        rates.append(("keys and values", ceilings.attended_bytes_per_second))
    if ceilings.row_product_bytes_per_second is not None:
        rates.append(("weights for a row", ceilings.row_product_bytes_per_second))
    if ceilings.device_memory_bytes_per_second is not None:
        rates.append(("device memory", ceilings.device_memory_bytes_per_second))
    for index, drive in enumerate(ceilings.drives):
        rates.append((f"ssd {index} read", drive.read_bytes_per_second))
        rates.append((f"ssd {index} write", drive.write_bytes_per_second))
        rates.append((f"ssd {index} both", drive.mixed_bytes_per_second))
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
    lines += [f"{name:<18} {plain_figure(rate / 1e9):>8} GB/s" for name, rate in rates]
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


def _measured_machine(options: Options) -> Ceilings | None:
    """Return the profile of this machine, or what a run measured of it; None if nobody measured."""
    profile = machine_profile_path()
    if profile.exists():
        return load_profile(profile)
    return find_kept(cache_directory(), Wanted(directories=options.budget.ssd, compute_dtype=options.compute_dtype))


def _of_one_epoch(model: Path, data: Sequence[Path], options: PlanOptions) -> PlanOptions:
    """Return the options with tokens per step, sequence length and the steps of one pass over the data, as in training."""
    from headrace.data.open_data import open_stream, with_lengths  # late: it brings the data libraries

    if not model.is_dir():
        raise ConfigError(f"data: the steps of a pass need the model's tokenizer, and {model} is no model directory")
    places = {"model": model, "data": [str(path) for path in data], "cache": cache_directory()}
    known = {key: value for key, value in vars(options).items() if key in RunOptions.keys()}  # noqa: SIM118 (no mapping)
    run = with_lengths(RunOptions(**known | places))
    steps = max(1, math.ceil(open_stream(run).steps_per_epoch))
    return replace(options, tokens_per_step=run.tokens_per_step, sequence_length=run.sequence_length, max_steps=steps)


def _say(event: Event) -> None:
    if isinstance(event, Notice):
        sys.stderr.write(f"{event.text}\n")


def _duration(seconds: float) -> str:
    return (
        f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2g} ms" if seconds < 1 else format_seconds(seconds)
    )
