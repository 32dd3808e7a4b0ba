"""Sweep the amount of kept operator outputs from none to all on one model: step time and memory, measured and planned.

    python bench/replay_sweep.py --scratch DIR --output docs/replay-sweep.svg [--machine PROFILE.json]

Each amount is run in turn in one process; medians are drawn against the forecast on the measured machine, and the planner's own
choice is marked. Needs matplotlib for the picture; the numbers are printed as a Markdown table anyway.
"""

import argparse
import dataclasses
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from shapes import SHAPES

import headrace
from headrace.engine import Engine
from headrace.machine import MemoryMeter
from headrace.model import profile
from headrace.plan.base import Plan
from headrace.plan.footprint import Allowance
from headrace.plan.forecast import forecast
from headrace.plan.search import Choice, Problem, Workload, nominal_ceilings, plan_of, replay_order
from headrace.spec.ceilings import Ceilings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--size", choices=sorted(SHAPES), default="S")
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--amounts", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="counted steps of each amount, after one that is not counted")
    parser.add_argument("--host-memory", default="8GiB")
    parser.add_argument("--machine", type=Path, help="profile written by `headrace bench machine`")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.scratch))
    try:
        rows = sweep(arguments, folder)
    finally:
        shutil.rmtree(folder)
    print("| kept outputs | step s, measured | step s, planned | peak MiB, measured | peak MiB, planned |")
    print("|---|---|---|---|---|")
    for row in rows:
        mark = " (chosen)" if row["chosen"] else ""
        print(
            f"| {row['amount']}{mark} | {row['seconds']:.2f} | {row['planned_seconds']:.2f} "
            f"| {row['peak_mib']:.0f} | {row['planned_mib']:.0f} |"
        )
    arguments.output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    draw(rows, arguments.output)


def sweep(arguments: argparse.Namespace, folder: Path) -> list[dict]:
    """Run all amounts and return a row for each."""
    model = folder / "model"
    script = Path(__file__).with_name("make_model.py")
    subprocess.run([sys.executable, str(script), "--size", arguments.size, str(model)], check=True)
    machine = Ceilings.from_json(json.loads(arguments.machine.read_text())) if arguments.machine else None
    chosen = run(arguments, folder, model, machine, None, rows=[])
    total = chosen["total"]
    rows: list[dict] = []
    for part in range(arguments.amounts):
        rows.append(run(arguments, folder, model, machine, total * part // (arguments.amounts - 1), rows=rows))
    return [*rows, {**chosen, "chosen": True}]


def run(
    arguments: argparse.Namespace, folder: Path, model: Path, machine: Ceilings | None, amount: int | None, rows: list
) -> dict:
    """Train some steps with `amount` outputs kept on the device (None: as the planner chooses)."""
    row: dict = {"chosen": False}

    def adjust(plan: Plan) -> Plan:
        problem = problem_of(engine_box[0], plan)
        row["total"] = len(replay_order(problem.costs_of(plan.micro_batch_sequences)))
        if amount is not None:
            choice = dataclasses.replace(base_choice(plan), amount=amount)
            made = plan_of(problem, choice)
            plan = dataclasses.replace(made, host_slots=plan.num_blocks)
        row["amount"] = sum(len(ordinals) for ordinals in plan.kept)
        row["planned_seconds"] = forecast(plan, machine or nominal_ceilings(problem)).step_seconds
        row["planned_mib"] = plan.peak("host") / 2**20
        return plan

    engine_box: list = []
    run_directory = folder / "run"

    class Watching(Engine):
        def _make_plan(self, *values: int) -> Plan:
            engine_box[:] = [self]
            return super()._make_plan(*values)

    with Watching.open(
        model,
        headrace.Budget(host=arguments.host_memory),
        headrace.AdamW(lr=1e-5),
        run_directory=run_directory,
        tokens_per_step=arguments.tokens_per_step,
        sequence_length=arguments.sequence_length,
        machine=machine,
        adjust_plan=adjust,
    ) as engine:
        meter = MemoryMeter()
        seconds = []
        for step in range(arguments.steps + 1):
            ids = torch.randint(3, 30000, (arguments.tokens_per_step // arguments.sequence_length, arguments.sequence_length))
            result = engine.step({"input_ids": ids, "labels": ids})
            if step:
                seconds.append(result.seconds)
        row |= {"seconds": statistics.median(seconds), "peak_mib": meter.peak_bytes() / 2**20}
        meter.close()
    shutil.rmtree(run_directory)
    return row


def base_choice(plan: Plan) -> Choice:
    return Choice(rows=plan.micro_batch_sequences, input_home="device", kept_home="device", chunk_elements=plan.chunk_elements)


def problem_of(engine: Engine, plan: Plan) -> Problem:
    """Return the planner's problem as the engine posed it."""
    return Problem(
        layouts=engine.chain.layouts,
        costs_of=lambda sequences: profile(engine.chain, sequences, plan.sequence_length),
        workload=Workload(tokens_per_step=plan.tokens_per_step, sequence_length=plan.sequence_length, clip=False),
        allowance=Allowance(
            host_bytes=plan.allowed_bytes["host"],
            device_bytes=None,
            runtime_bytes=plan.peak_bytes["host"]["runtime"],
            cores=plan.compute_threads,
        ),
    )


def draw(rows: list[dict], path: Path) -> None:
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
    main()
