"""Sweep the amount of kept operator outputs from none to all on one model: step time and memory, measured and planned.

    python bench/replay_sweep.py --scratch DIR --output docs/replay-sweep.svg [--machine PROFILE.json]

Without a profile the machine is measured first. The planner's own choice and all amounts are run in turn, for some rounds, in
one process; medians are drawn against the forecast, and the planner's choice is marked. Writes the picture (matplotlib), and
beside it a Markdown table and JSON. At size S less than eight minutes on two quiet cores.
"""

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from launch import environment, make_model, require_disk, scratch_directory
from shapes import SHAPES, TokenStream
from worker import refuse

import headrace
from headrace.engine.trainer import Engine
from headrace.machine.meter import MemoryMeter
from headrace.measure.machine import measure_machine
from headrace.model import Profiles
from headrace.plan.forecast.forecast import forecast
from headrace.plan.search.problem import Problem
from headrace.plan.search.space import Choice, filled, plan_of
from headrace.plan.value.allowance import Allowance
from headrace.plan.value.plan import Plan
from headrace.plan.value.replaying import replay_order
from headrace.plan.value.workload import Workload
from headrace.terms.forms import in_place_forms
from headrace.terms.machine.ceilings import Ceilings

Row = dict[str, Any]


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True, help="directory on the disk under test; nothing stays in it")
    parser.add_argument("--output", type=Path, required=True, help="picture to write; .md and .json go beside it")
    parser.add_argument("--size", choices=sorted(SHAPES), default="S")
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--amounts", type=int, default=5, help="from nothing kept to everything")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="counted steps of each run, after one that is not counted")
    parser.add_argument("--host-memory", default="8GiB")
    parser.add_argument("--machine", type=Path, help="profile written by `headrace bench machine`")
    parser.add_argument("--machine-seconds", type=float, default=60, help="without --machine: seconds to measure it for")
    return parser.parse_args(arguments)


def main() -> int:
    options = options_of()
    if options.amounts < 2 or options.rounds < 1 or options.steps < 1 or options.tokens_per_step % options.sequence_length:
        refuse("--amounts must be at least 2, --rounds and --steps 1, --tokens-per-step a multiple of --sequence-length")
    variables = environment(omp_wait_policy="passive")
    if "GOMP_SPINCOUNT" not in os.environ:  # read when the library is loaded: this process begins again with it
        os.execve(sys.executable, [sys.executable, *sys.argv], variables)
    with scratch_directory(options.scratch) as folder:
        require_disk(folder, 30 * SHAPES[options.size].parameters, f"size {options.size}")
        machine = machine_of(options, folder)
        model = folder / "model"
        make_model(options.size, model, variables)
        rows = summarised(sweep(options, folder, model, machine))
    table = table_of(rows, options, machine)
    print(table)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.with_suffix(".md").write_text(table, encoding="utf-8")
    options.output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    draw(rows, options.output)
    return 0


def machine_of(options: argparse.Namespace, folder: Path) -> Ceilings:
    """Return the profile that is given, or measure this machine."""
    if options.machine is not None:
        return Ceilings.from_json(json.loads(options.machine.read_text(encoding="utf-8")))
    print(f"measuring the machine for {options.machine_seconds:.0f} s ...", flush=True)
    return measure_machine([folder], seconds_budget=options.machine_seconds)


def sweep(options: argparse.Namespace, folder: Path, model: Path, machine: Ceilings) -> list[Row]:
    """Run the planner's choice and all amounts, round after round, and return a row for each run."""
    rows: list[Row] = []
    for number in range(options.rounds):
        rows.append(run(options, folder, model, machine, None))
        total = rows[0]["total"]
        for part in range(options.amounts):
            rows.append(run(options, folder, model, machine, total * part // (options.amounts - 1)))
        for row in rows[-options.amounts - 1 :]:
            words = f"{row['amount']} kept{', the planner' if row['chosen'] else ''}"
            print(f"round {number}: {words}: {row.get('seconds', float('nan')):.2f} s", flush=True)
    return rows


def summarised(rows: list[Row]) -> list[Row]:
    """Return the medians over rounds, by amount; the planner's choice last. Amounts that do not fit are left out."""
    groups: dict[tuple[bool, int], list[Row]] = {}
    for row in rows:
        if "seconds" in row:
            groups.setdefault((row["chosen"], row["amount"]), []).append(row)
    keys = ("seconds", "planned_seconds", "peak_mib", "planned_mib", "kept_mib")
    medians = [
        own[0] | {key: statistics.median(row[key] for row in own) for key in keys} | {"rounds": len(own)}
        for own in groups.values()
    ]
    return sorted(medians, key=lambda row: (row["chosen"], row["amount"]))


def table_of(rows: list[Row], options: argparse.Namespace, machine: Ceilings) -> str:
    """Return the Markdown table, and how far the planner's choice is from the best point."""
    lines = [
        f"Size {options.size}, {SHAPES[options.size].parameters / 1e6:.0f} million parameters, "
        f"{options.tokens_per_step} tokens per step in sequences of {options.sequence_length}, {options.host_memory} allowed; "
        f"medians of {options.rounds} interleaved rounds of {options.steps} steps. {machine.name}.",
        "",
        "| kept outputs | MiB kept | step s, measured | step s, planned | peak MiB, measured | peak MiB, planned |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        mark = " (the planner's choice)" if row["chosen"] else ""
        lines.append(
            f"| {row['amount']} of {row['total']}{mark} | {row['kept_mib']:.0f} | {row['seconds']:.2f} "
            f"| {row['planned_seconds']:.2f} | {row['peak_mib']:.0f} | {row['planned_mib']:.0f} |"
        )
    chosen = next((row for row in rows if row["chosen"]), None)
    if chosen is not None:
        best = min(rows, key=lambda row: row["seconds"])
        above = chosen["seconds"] / best["seconds"] - 1
        lines += ["", f"The planner's choice is within {above:.1%} of the best point ({best['amount']} outputs kept)."]
    return "\n".join([*lines, ""])


def run(options: argparse.Namespace, folder: Path, model: Path, machine: Ceilings, amount: int | None) -> Row:
    """Train some steps with `amount` outputs kept in memory (None: as the planner chooses)."""
    row: Row = {"chosen": amount is None, "amount": amount}
    opened: list[Engine] = []

    class DoesNotFit(Exception):
        """Ends the opening before anything is written."""

    def adjust(plan: Plan) -> Plan:
        problem = problem_of(opened[0], plan, machine)
        row["total"] = len(replay_order(problem.costs_of(plan.batch.micro_batch_sequences)))
        if amount is not None:
            plan = filled(problem, plan_of(problem, dataclasses.replace(base_choice(plan), amount=amount)))
            if not plan.fits:
                raise DoesNotFit
        row["amount"] = sum(len(ordinals) for ordinals in plan.stash.kept)
        row["kept_mib"] = sum(plan.stash.kept_bytes) * plan.batch.num_micro_batches / 2**20
        row["planned_seconds"] = forecast(plan, machine).step_seconds
        row["planned_mib"] = plan.peak("host") / 2**20
        return plan

    run_directory = folder / "run"

    class Watching(Engine):
        def __init__(self, *values: Any) -> None:
            opened[:] = [self]
            super().__init__(*values)

    rows, length = options.tokens_per_step // options.sequence_length, options.sequence_length
    stream = TokenStream(SHAPES[options.size].vocabulary)
    try:
        engine = Watching.open(
            model,
            headrace.Options(
                host_memory=options.host_memory,
                output=run_directory,
                max_grad_norm=None,
                tokens_per_step=options.tokens_per_step,
                sequence_length=length,
                machine=machine,
            ),
            adjust_plan=adjust,
        )
    except DoesNotFit:
        shutil.rmtree(run_directory, ignore_errors=True)
        return row
    with engine:
        meter = MemoryMeter()
        seconds = []
        for step in range(options.steps + 1):
            ids = torch.from_numpy(stream.batch(step, sequences=rows, length=length))
            result = engine.step({"input_ids": ids, "labels": ids})
            if step:
                seconds.append(result.seconds)
        row |= {"seconds": statistics.median(seconds), "peak_mib": meter.peak_bytes() / 2**20}
        meter.close()
    shutil.rmtree(run_directory)
    return row


def base_choice(plan: Plan) -> Choice:
    """Return the planner's choice without what it keeps, all of it in memory."""
    return Choice(
        policy=plan.updates.policy,
        rows=plan.batch.micro_batch_sequences,
        input_home="device",
        kept_home="device",
        freed_memory=plan.freed_memory,
        chunk_elements=plan.updates.chunk_elements,
        state_slots=plan.updates.state_slots,
    )


def problem_of(engine: Engine, plan: Plan, machine: Ceilings) -> Problem:
    """Return the planner's problem as the engine posed it."""
    return Problem(
        forms=in_place_forms(engine.chain.layouts, engine.chain.num_blocks, plan.rule),
        rule=plan.rule,
        costs_of=partial(Profiles(engine.chain).of, length=plan.batch.sequence_length),
        workload=Workload(tokens_per_step=plan.batch.tokens_per_step, sequence_length=plan.batch.sequence_length, clip=False),
        allowance=Allowance(
            host_bytes=plan.results.allowed_bytes["host"],
            device_bytes=None,
            runtime_bytes=plan.results.peak_bytes["host"]["runtime"],
            cores=plan.compute_threads,
        ),
        attention_share=machine.attention_share,
    )


def draw(rows: list[Row], path: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    swept = [row for row in rows if not row["chosen"]]
    chosen = next(row for row in rows if row["chosen"])
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, key, label in ((left, "seconds", "step, s"), (right, "peak_mib", "peak host memory, MiB")):
        planned = "planned_seconds" if key == "seconds" else "planned_mib"
        amounts = [row["amount"] for row in swept]
        axis.plot(amounts, [row[key] for row in swept], "o-", label="measured")
        axis.plot(amounts, [row[planned] for row in swept], "s--", label="planned")
        axis.plot([chosen["amount"]], [chosen[key]], "*", markersize=14, label="the planner's choice")
        axis.set_xlabel("operator outputs kept")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path)


if __name__ == "__main__":
    raise SystemExit(main())
