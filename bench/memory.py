"""Memory and traffic of one Headrace run: 1.35 billion parameters inside 2.5 GiB of host memory, import included.

Prints the sampled peak of anonymous memory against the budget, and SSD bytes per parameter and step from /proc against the
engine's own counters. Ends with exit code 1 if the run failed, if the peak is above the budget, if more bytes were written per
parameter and step than the rule's planes have (12 for AdamW), or more than two more were read, or if the counters miss a
twentieth of the traffic.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from launch import GIB, HERE, environment, machine_facts, make_model, require_disk, run_worker, scratch_directory
from shapes import SHAPES
from worker import refuse

from headrace.terms.options.options import Options
from headrace.update import rule_of
from headrace.update.rules.table import optimizer_of

READ_AGAIN = 2  # bytes per parameter and step: backward reads the weights a second time (docs/architecture.md)
UNITS = {"MiB": 2**20, "GiB": 2**30}


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True, help="directory on the disk under test; nothing stays in it")
    parser.add_argument("--output", type=Path, default=None, help="JSON file to write")
    parser.add_argument("--size", choices=list(SHAPES), default="L")
    parser.add_argument("--optimizer", default="adamw:beta1=0.9,beta2=0.95,eps=1e-8", help="the rule and its settings")
    parser.add_argument("--host-memory", default="2.5GiB", help="in MiB or GiB")
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--timeout-seconds", type=float, default=1800)
    return parser.parse_args()


def budget_bytes(text: str) -> float:
    """Return the bytes that `text` names."""
    number, unit = text[:-3], text[-3:]
    if unit not in UNITS or not number.replace(".", "", 1).isdigit():
        refuse(f"--host-memory {text!r}: write a number and MiB or GiB, such as 2.5GiB")
    return float(number) * UNITS[unit]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of one run in a scratch directory that is gone afterwards."""
    variables = environment(omp_wait_policy="passive")
    with scratch_directory(options.scratch) as scratch:
        require_disk(scratch, 28 * SHAPES[options.size].parameters, f"size {options.size}")
        model = scratch / "model"
        make_model(options.size, model, variables)
        command = [sys.executable, str(HERE / "run_headrace.py"), "--model", str(model), "--size", options.size]
        for name in ("optimizer", "host_memory", "tokens_per_step", "sequence_length", "steps"):
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        facts = machine_facts(scratch)
        return {"machine": facts} | run_worker(command, variables, scratch=scratch, timeout_seconds=options.timeout_seconds)


def traffic(record: dict[str, Any], parameters: int) -> list[tuple[str, float, float]]:
    """Return `(direction, bytes by /proc, bytes by the engine)` per parameter and step, over the steps after the first."""
    rows = record["rows"][1:]
    per_step = parameters * len(rows)

    def counted(way: str) -> int:
        return sum(row[f"engine_{way}_bytes"].get("ssd", 0) for row in rows)

    return [(way, record["totals"][f"{way}_bytes"] / per_step, counted(way) / per_step) for way in ("read", "written")]


def judge(record: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """Print what was measured and return what is wrong with it."""
    budget, peak = budget_bytes(options.host_memory), record["peak_anonymous_bytes"]
    loading, stepping = record["peak_anonymous_bytes_loading"], record["peak_anonymous_bytes_stepping"]
    print(f"peak anonymous memory {peak / GIB:.3f} GiB of {budget / GIB:.3f} GiB", end="")
    print(f" (loading {loading / GIB:.3f}, stepping {stepping / GIB:.3f})")
    wrong = [f"the peak is {(peak - budget) / 2**20:.0f} MiB above the budget"] if peak > budget else []
    directions = traffic(record, SHAPES[options.size].parameters)
    planes = rule_of(optimizer_of(Options(optimizer=options.optimizer)), "bfloat16").planes
    written = planes.num_bytes(1 << 20) / (1 << 20)
    for (way, seen, counted), limit in zip(directions, (written + READ_AGAIN, written), strict=True):
        print(f"SSD bytes {way} per parameter and step: {seen:.2f} by /proc, {counted:.2f} by the engine, limit {limit:.0f}")
        if seen > limit:
            wrong.append(f"{seen:.2f} bytes {way} per parameter and step are above {limit:.0f}")
        if abs(seen - counted) > 0.05 * max(seen, counted):
            wrong.append(f"the engine counts {counted:.2f} bytes {way} where /proc sees {seen:.2f} per parameter and step")
    seconds = [f"{row['seconds']:.1f}" for row in record["rows"]]
    print(f"start {record['start_up_seconds']:.1f} s, steps {', '.join(seconds)} s, end {record['finish_seconds']:.1f} s")
    print("losses", ", ".join(f"{row['loss']:.5f}" for row in record["rows"]))
    return wrong


def main() -> int:
    options = options_of()
    budget_bytes(options.host_memory)
    if options.steps < 2:
        refuse(f"--steps {options.steps}: at least 2, the first is left out of the traffic")
    record = run(options)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(record | {"options": vars(options)}, indent=1, default=str), encoding="utf-8")
    if record["status"] != "ok":
        print(record["status"], record["log"], sep="\n")
        return 1
    wrong = judge(record, options)
    for line in wrong:
        print(f"NOT KEPT: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
