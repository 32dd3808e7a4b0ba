"""Planned against measured, and the distance to the limit, over sizes, budgets, tokens per step, with and without clipping.

    python bench/promise.py --scratch DISK --output results/promise

Measures this machine (the code of `headrace bench machine`), then trains each combination in a process of its own on a plan
made for that profile, in interleaved rounds. OUTPUT.json has every run and grows with each, so that an interrupted command goes
on where it was when it is given again; OUTPUT.md has the table. Exit code 1 if a run failed, 2 if the command was wrong.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from launch import (
    GIB,
    HERE,
    environment,
    machine_facts,
    make_model,
    measure_machine,
    require_disk,
    run_worker,
    scratch_directory,
)
from shapes import SHAPES
from worker import refuse

from headrace.terms.lanes import Lane

Row = dict[str, Any]
MODEL_BYTES, STATE_BYTES = 2, 24  # per parameter: the checkpoint, and two slots of twelve bytes
SEQUENCE_LENGTH = 512


@dataclass(frozen=True)
class Combination:
    """One line of the table. Tight budgets are a few per cent above the least that the planner takes."""

    size: str
    tokens_per_step: int
    clip: bool
    host_memory: str
    steps: int
    tight: bool = False

    @property
    def name(self) -> str:
        return f"{self.size}-{self.tokens_per_step}{'-clip' if self.clip else ''}{'-tight' if self.tight else ''}"


# On a CPU of two cores: lines of 256 tokens wait for the SSD, those of 1024 and more for compute; S-512 and L-256-clip lie
# between. Lines with clipping and much memory keep states there and write them at each commit.
COMBINATIONS = (
    Combination("S", 256, False, "1GiB", 10, tight=True),
    Combination("S", 256, False, "1.5GiB", 10),
    Combination("S", 256, True, "960MiB", 10, tight=True),
    Combination("S", 512, False, "4GiB", 10),
    Combination("S", 512, True, "4GiB", 10),
    Combination("S", 2048, False, "4GiB", 8),
    Combination("S", 2048, True, "1.1GiB", 8, tight=True),
    Combination("M", 256, False, "1.2GiB", 7, tight=True),
    Combination("M", 256, False, "2GiB", 7),
    Combination("M", 256, True, "7GiB", 7),
    Combination("M", 2048, False, "6GiB", 6),
    Combination("M", 2048, True, "1.6GiB", 6, tight=True),
    Combination("L", 256, False, "2.2GiB", 5, tight=True),
    Combination("L", 256, False, "3GiB", 5),
    Combination("L", 256, True, "7GiB", 5),
    Combination("L", 1024, False, "4GiB", 5),
    Combination("L", 1024, True, "10GiB", 5),
)
# For trying the script out: seconds.
TRIAL = (
    Combination("T", 128, False, "1GiB", 5),
    Combination("T", 256, True, "1GiB", 5),
)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    names = ", ".join(combination.name for combination in (*COMBINATIONS, *TRIAL))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True, help="directory on the disk under test; nothing stays in it")
    parser.add_argument("--output", type=Path, required=True, help="results go to OUTPUT.json and OUTPUT.md")
    parser.add_argument("--only", default=None, metavar="NAMES", help=f"of: {names} (T is for trying the script out)")
    parser.add_argument("--rounds", type=int, default=1, help="repeats of the whole table, one after the other")
    parser.add_argument("--steps", type=int, default=0, help="steps of each run; 0: 5 to 10, as the table says")
    parser.add_argument("--warmup", type=int, default=2, help="steps left out")
    parser.add_argument("--bare-repeats", type=int, default=3, help="of the last step's requests, with nothing beside them")
    parser.add_argument("--profile", type=Path, default=None, help="a profile of `headrace bench machine`, not to measure anew")
    parser.add_argument("--measure-each", action="store_true", help="a new profile before each run: where speeds drift")
    parser.add_argument("--profile-seconds", type=float, default=90, help="seconds to measure the machine for")
    parser.add_argument("--timeout-seconds", type=float, default=3600, help="of one run")
    return parser.parse_args(arguments)


def chosen(only: str | None) -> list[Combination]:
    """Return the combinations that are named, in the order of the table; all but the trial ones without names."""
    if only is None:
        return list(COMBINATIONS)
    known = {combination.name: combination for combination in (*COMBINATIONS, *TRIAL)}
    names = only.split(",")
    for name in names:
        if name not in known:
            refuse(f"--only: {name!r} is none of {', '.join(known)}")
    return [combination for name, combination in known.items() if name in names]


def read_results(path: Path) -> dict[str, Any]:
    """Return what an earlier command left, or an empty beginning."""
    if not path.exists():
        return {"machine": None, "profile": None, "runs": []}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found["runs"], list) and "profile" in found:
            return dict(found)
    except (ValueError, KeyError, TypeError):
        pass
    refuse(f"--output: {path} is no result of this script; move it away, or name another output")


def save(results: dict[str, Any], path: Path) -> None:
    """Replace the file at once: an interruption leaves the old one or the new one."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(results, indent=1, default=str), encoding="utf-8")
    beside.replace(path)


def profile_of(options: argparse.Namespace, results: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """Return the profile by which all runs are planned: given, the one of the results that are gone on with, or measured.
    None where each run has its own.
    """
    if results["runs"] and options.measure_each != (results["profile"] is None):
        refuse("--measure-each: some results that are there were made otherwise; name another --output")
    if options.measure_each:
        return None
    if options.profile is not None:
        try:
            given = json.loads(options.profile.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            refuse(f"--profile {options.profile}: cannot be read ({error}); make one with `headrace bench machine`")
        if results["runs"] and given != results["profile"]:
            refuse("--profile: the results that are there were made with another one; name another --output")
        return dict(given)
    if results["profile"] is not None:
        return dict(results["profile"])
    return measure_machine(path.parent, path, options.profile_seconds)


def command_of(combination: Combination, options: argparse.Namespace, model: Path, profile: Path) -> list[str]:
    steps = options.steps or combination.steps
    values = {
        "model": model,
        "size": combination.size,
        "tokens-per-step": combination.tokens_per_step,
        "sequence-length": min(SEQUENCE_LENGTH, combination.tokens_per_step),
        "host-memory": combination.host_memory,
        "max-grad-norm": 1.0 if combination.clip else 0.0,
        "steps": steps,
        "warmup": options.warmup,
        "machine": profile,
        "observe": options.bare_repeats,
    }
    return [
        sys.executable,
        str(HERE / "run_headrace.py"),
        *(part for key, value in values.items() for part in (f"--{key}", str(value))),
    ]


def row_of(run: Row) -> Row:
    """Return the figures of a run that ended well; ratios are measured over planned, or attained over possible."""
    seen, counted = run["settings"]["observed"], run["rows"][run["settings"]["warmup"] :]
    planned, ssd, bare = seen["planned"], seen["ssd"], seen["bare"]
    seconds = median(row["seconds"] for row in counted)
    peak, planned_peak = run["peak_anonymous_bytes_training"], planned["peak_bytes"]["host"]
    beside = seen["interference"]
    ssd_planned = (planned["ssd_read_bytes"] + planned["ssd_written_bytes"]) * seen["steps"]
    attained = ssd["bytes_per_second"]
    return {
        "step_seconds": seconds,
        "planned_seconds": planned["step_seconds"],
        "seconds_ratio": seconds / planned["step_seconds"],
        "peak_bytes": peak,
        "planned_peak_bytes": planned_peak,
        "peak_ratio": peak / planned_peak,
        "bound_seconds": planned["lower_bound_seconds"],
        "bound_ratio": seconds / planned["lower_bound_seconds"],
        "cores_seconds": planned["core_seconds"] / run["cores"],
        "ssd_bytes_ratio": ssd["bytes"] / ssd_planned if ssd_planned else None,
        "ssd_bytes_per_second": attained,
        "bare_bytes_per_second": bare["bytes_per_second"] if bare else None,
        "ssd_efficiency": attained / bare["bytes_per_second"] if attained and bare else None,
        "ssd_efficiency_in_order": attained / bare["in_order_bytes_per_second"] if attained and bare else None,
        "ssd_efficiency_beside_load": attained / bare["beside_load_bytes_per_second"] if attained and bare else None,
        "interference_verb": beside["verb"],
        "compute_slowdown": beside["ratio"],
        "expected_slowdown": beside["expected"],
        "expected_slowdown_with_drives": beside["expected_with_drives"],
        "slowdown_ratio": beside["ratio"] / beside["expected"] if beside["ratio"] else None,
        "others_cpu_seconds": median(row["others_cpu_seconds"] for row in counted),
        "busy_seconds": {lane: use["busy_seconds"] / seen["steps"] for lane, use in seen["lanes"]["lanes"].items()},
        "planned_busy_seconds": {lane: use["busy_seconds"] for lane, use in planned["lanes"].items()},
        "limited_by": planned["explanation"],
    }


def medians_of(rows: Sequence[Row]) -> Row:
    """Return the median of each figure over the rounds of one combination; texts are the first round's."""
    first = rows[0]
    return {key: _middle([row[key] for row in rows]) for key in first}


def _middle(values: list[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if isinstance(known[0], dict):
        return {key: median(value.get(key, 0.0) for value in known) for key in known[0]}
    return known[0] if isinstance(known[0], str) else median(known)


RATIOS = {
    "seconds_ratio": "step seconds, measured / planned",
    "peak_ratio": "host peak, measured / planned",
    "bound_ratio": "step seconds, measured / lower bound",
    "ssd_efficiency": "SSD rate in training / bare loop of the same requests",
    "ssd_efficiency_in_order": "the same, requests in the order of the step",
    "ssd_efficiency_beside_load": "the same, beside cores that multiply matrices",
    "compute_slowdown": "seconds of compute's operations with an update behind them / alone",
    "slowdown_ratio": "that slowdown, measured / by the core seconds of the other lanes",
}


def summaries_of(runs: Sequence[Row]) -> dict[str, Row]:
    """Return medians over rounds by the name of the combination, of runs that ended well."""
    by_name: dict[str, list[Row]] = {}
    for run in runs:
        if run["status"] == "ok":
            by_name.setdefault(run["name"], []).append(row_of(run))
    return {name: medians_of(rows) | {"rounds": len(rows)} for name, rows in by_name.items()}


def table_of(results: dict[str, Any]) -> str:
    """Return the page: one line for each combination, lanes, then medians of ratios over the table."""
    summaries, facts = summaries_of(results["runs"]), results["machine"] or {}
    lines = [
        "# Planned against measured",
        "",
        f"Made by `python bench/promise.py` on {facts.get('date', '?')}: {facts.get('cores', '?')} cores "
        f"({facts.get('processor', '?')}), {facts.get('memory_bytes', 0) / GIB:.0f} GiB, {facts.get('file_system', '?')}; "
        "plans and bounds for the profile measured just before. Medians over the steps after the warm-up, then over rounds.",
        "",
        "| run | rounds | step s planned | measured | / | host peak GiB planned | measured | / "
        "| lower bound s | measured / bound | cores' arithmetic s | SSD GB/s | bare GB/s "
        "| SSD efficiency (in order; beside products) "
        "| compute beside update / alone | by arithmetic (and drives) "
        "| others' CPU s |",
        "|" + "---|" * 17,
    ]
    for name, row in summaries.items():
        lines.append(
            f"| {name} | {row['rounds']} | {_text(row['planned_seconds'])} | {_text(row['step_seconds'])} "
            f"| {_text(row['seconds_ratio'])} | {_text(row['planned_peak_bytes'], GIB)} | {_text(row['peak_bytes'], GIB)} "
            f"| {_text(row['peak_ratio'])} | {_text(row['bound_seconds'])} | {_text(row['bound_ratio'])} "
            f"| {_text(row['cores_seconds'])} | {_text(row['ssd_bytes_per_second'], 1e9)} "
            f"| {_text(row['bare_bytes_per_second'], 1e9)} | {_text(row['ssd_efficiency'])} "
            f"({_text(row['ssd_efficiency_in_order'])}; {_text(row['ssd_efficiency_beside_load'])}) "
            f"| {_text(row['compute_slowdown'])} ({row['interference_verb']}) "
            f"| {_text(row['expected_slowdown'])} ({_text(row['expected_slowdown_with_drives'])}) "
            f"| {_text(row['others_cpu_seconds'])} |"
        )
    lanes = [lane for lane in Lane if any(row["busy_seconds"].get(lane) for row in summaries.values())]
    lines += [
        "",
        "Busy seconds of each lane per step, measured (planned):",
        "",
        "| run | " + " | ".join(lanes) + " | the plan |",
    ]
    lines.append("|" + "---|" * (len(lanes) + 2))
    for name, row in summaries.items():
        cells = [f"{row['busy_seconds'].get(lane, 0):.2f} ({row['planned_busy_seconds'].get(lane, 0):.2f})" for lane in lanes]
        lines.append(f"| {name} | {' | '.join(cells)} | {row['limited_by'].split('; ')[0]} |")
    lines += ["", "Medians over the table, with the range:", ""]
    for key, words in RATIOS.items():
        values = [row[key] for row in summaries.values() if row[key] is not None]
        if values:
            lines.append(f"- {words}: **{median(values):.2f}** ({min(values):.2f} to {max(values):.2f}, {len(values)} runs)")
    lines += ["", *_failures(results["runs"]), *NOTES, ""]
    return "\n".join(lines)


NOTES = (
    "Lower bound: the least time for the program's bytes and operations by measured ceilings, whichever lanes run together, "
    "where lanes that share a drive, cores or memory slow one another as measured. Cores' arithmetic: all core seconds "
    "over the number of cores; a step may be below it by what compute leaves idle. SSD rate: bytes over the seconds in which a "
    "lane of the SSD or a commit is busy. Bare loop: the last step's requests again, from as many threads, with nothing beside "
    "them; in order: in ten slices, as the step had them; beside products: so, while as many threads as compute has multiply "
    "matrices, so that what is still missing is the engine's. Compute beside update: operations behind which an update ran, "
    "against the same ones in a step whose operations run one after the other; by arithmetic: did compute lose the core "
    "seconds that updates, drains and I/O took meanwhile, shared by all cores; and drives: did it lose what the profile says "
    "it loses beside reads and writes, instead of their core seconds.",
)


def _failures(runs: Iterable[Row]) -> list[str]:
    return [f"- {run['name']}, round {run['round']}: {run['status']}" for run in runs if run["status"] != "ok"]


def _text(value: float | None, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:.2f}"


def line_of(run: Row) -> str:
    """Return one line about a run that just ended."""
    head = f"round {run['round']} {run['name']}: "
    if run["status"] != "ok":
        return head + run["status"] + "\n" + run["log"][-1200:]
    row = row_of(run)
    return (
        f"{head}{row['step_seconds']:.2f} s a step, planned {row['planned_seconds']:.2f} (x {row['seconds_ratio']:.2f}), "
        f"bound {row['bound_seconds']:.2f} (x {row['bound_ratio']:.2f}); peak x {row['peak_ratio']:.2f}; "
        f"SSD efficiency {_text(row['ssd_efficiency'])} (in order {_text(row['ssd_efficiency_in_order'])}, "
        f"beside products {_text(row['ssd_efficiency_beside_load'])}); "
        f"compute beside update x {_text(row['compute_slowdown'])}, by arithmetic x {_text(row['expected_slowdown'])} "
        f"(and drives x {_text(row['expected_slowdown_with_drives'])}); "
        f"others' CPU {row['others_cpu_seconds']:.2f} s"
    )


def run_all(options: argparse.Namespace, combinations: list[Combination], results: dict[str, Any], path: Path) -> None:
    """Run what is not there yet, and save after each run."""
    with scratch_directory(options.scratch) as scratch:
        largest = max(SHAPES[combination.size].parameters for combination in combinations)
        require_disk(scratch, (MODEL_BYTES + STATE_BYTES) * largest, "the largest of these runs")
        results["machine"] = results["machine"] or machine_facts(scratch)
        profile = scratch / "profile.json"
        results["profile"] = profile_of(options, results, profile)
        profile.write_text(json.dumps(results["profile"]), encoding="utf-8")  # of all runs, or nothing yet
        save(results, path)
        variables = environment(omp_wait_policy="passive")
        done = {(run["name"], run["round"]) for run in results["runs"] if run["status"] == "ok"}
        results["runs"] = [run for run in results["runs"] if run["status"] == "ok"]  # what failed is tried again
        for number in range(options.rounds):
            model, written = scratch / "model", ""
            for combination in combinations:
                if (combination.name, number) in done:
                    print(f"round {number} {combination.name}: is there already", flush=True)
                    continue
                if written != combination.size:
                    written, model = combination.size, scratch / f"model-{number}-{combination.size}"
                    for old in scratch.glob("model-*"):
                        remove_model(old)  # one at a time: the largest run leaves little below the limit
                    make_model(combination.size, model, variables)
                about = {"name": combination.name, "round": number, "combination": asdict(combination)}
                if options.measure_each:
                    about["profile"] = measure_machine(profile.parent, profile, options.profile_seconds)
                command = command_of(combination, options, model, profile)
                run = run_worker(command, variables, scratch=scratch, timeout_seconds=options.timeout_seconds)
                results["runs"].append(about | {"cores": results["machine"]["cores"]} | run)
                print(line_of(results["runs"][-1]), flush=True)
                save(results, path)


def remove_model(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()


def main() -> int:
    options = options_of()
    combinations = chosen(options.only)
    least = options.steps or min(combination.steps for combination in combinations)
    if options.measure_each and options.profile is not None:
        refuse("--measure-each and --profile: one profile for all runs, or one for each, not both")
    if options.rounds < 1 or not 0 <= options.warmup < least or options.bare_repeats < 1:
        refuse(
            f"--rounds {options.rounds} and --bare-repeats {options.bare_repeats} must be at least 1, "
            f"and --warmup {options.warmup} less than the {least} steps"
        )
    path = Path(f"{options.output}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    results = read_results(path)
    run_all(options, combinations, results, path)
    table = table_of(results)
    Path(f"{options.output}.md").write_text(table, encoding="utf-8")
    print("\n" + table)
    return 0 if all(run["status"] == "ok" for run in results["runs"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
