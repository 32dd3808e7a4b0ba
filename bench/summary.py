"""From the records of the runs to one summary per contestant and a Markdown table.

Invariant: a ratio is only ever formed between two runs of the same round, so that a machine that slows down during an hour
slows both sides of it.
"""

import argparse
from statistics import median
from typing import Any

from launch import GIB
from shapes import SHAPES

Run = dict[str, Any]  # what launch.run_worker returns, with `name` and `round`
Summary = dict[str, Any]
NONE = float("nan")


def steps_of(run: Run, warmup: int, key: str = "seconds") -> float:
    """Return the median of `key` over the steps after the warm-up."""
    return median(row[key] for row in run["rows"][warmup:])


def progress_line(run: Run, warmup: int) -> str:
    """Return one line about a run that just ended."""
    head = f"round {run['round']} {run['name']}: "
    if run["status"] != "ok":
        return head + run["status"] + "\n" + run["log"][-1200:]
    return (
        f"{head}{steps_of(run, warmup):.2f} s a step, CPU {steps_of(run, warmup, 'cpu_seconds'):.2f} s "
        f"(others {steps_of(run, warmup, 'others_cpu_seconds'):.2f} s), peak {run['peak_anonymous_bytes'] / GIB:.2f} GiB, "
        f"loss {run['rows'][0]['loss']:.5f} -> {run['rows'][-1]['loss']:.5f}"
    )


def summary_of(name: str, runs: list[Run], reference: list[Run], options: argparse.Namespace) -> Summary:
    """Return the medians of one contestant over its rounds, and its ratios to the reference's runs of the same rounds."""
    good = [run for run in runs if run["status"] == "ok"]
    if not good:
        return {"name": name, "status": runs[0]["status"]}
    parameters = SHAPES[options.size].parameters
    counted = options.steps - options.warmup
    over_rounds = {
        "step_seconds": [steps_of(run, options.warmup) for run in good],
        "step_seconds_mean": [run["totals"]["seconds"] / counted for run in good],
        "cpu_seconds": [run["totals"]["cpu_seconds"] / counted for run in good],
        "others_cpu_seconds": [run["totals"]["others_cpu_seconds"] / counted for run in good],
        "read_bytes_per_parameter": [run["totals"]["read_bytes"] / counted / parameters for run in good],
        "written_bytes_per_parameter": [run["totals"]["written_bytes"] / counted / parameters for run in good],
        "peak_anonymous_bytes": [run["peak_anonymous_bytes"] for run in good],
        "peak_anonymous_bytes_stepping": [run["peak_anonymous_bytes_stepping"] for run in good],
        "disk_peak_bytes": [run["disk_peak_bytes"] for run in good],
        "start_up_seconds": [run["start_up_seconds"] for run in good],
        "finish_seconds": [run["finish_seconds"] for run in good],
    }
    summary = {"name": name, "status": "ok", "rounds": len(good)} | {key: median(values) for key, values in over_rounds.items()}
    summary["step_seconds_fastest"] = min(row["seconds"] for run in good for row in run["rows"][options.warmup :])
    summary["tokens_per_second"] = options.tokens_per_step / summary["step_seconds"]
    summary["losses"] = [row["loss"] for row in good[0]["rows"]]
    beside = {run["round"]: run for run in reference if run["status"] == "ok"}
    pairs = [(run, beside[run["round"]]) for run in good if run["round"] in beside]
    if pairs:
        ratios = [steps_of(run, options.warmup) / steps_of(other, options.warmup) for run, other in pairs]
        summary |= {"step_ratio": median(ratios), "step_ratio_range": [min(ratios), max(ratios)]}
        summary["memory_ratio"] = median(run["peak_anonymous_bytes"] / other["peak_anonymous_bytes"] for run, other in pairs)
    return summary


def summaries_of(names: list[str], runs: list[Run], options: argparse.Namespace) -> list[Summary]:
    """Return one summary per contestant. Losses are compared with `plain` where it ran, else with the reference."""
    by_name = {name: [run for run in runs if run["name"] == name] for name in names}
    reference = by_name[names[0]]
    summaries = [summary_of(name, own, reference, options) for name, own in by_name.items()]
    finished = {summary["name"]: summary for summary in summaries if summary["status"] == "ok"}
    truth = finished.get("plain") or next(iter(finished.values()), None)
    for summary in finished.values():
        differences = [abs(a - b) for a, b in zip(summary["losses"][:10], truth["losses"][:10], strict=True)]
        summary.update(loss_compared_with=truth["name"], largest_loss_difference=max(differences))
    return summaries


def table_of(summaries: list[Summary], options: argparse.Namespace, facts: dict[str, Any]) -> str:
    """Return the Markdown table."""
    shape = SHAPES[options.size]
    lines = [
        f"Size {options.size}: {shape.parameters / 1e6:.0f} million parameters, {options.tokens_per_step} tokens per step in "
        f"sequences of {options.sequence_length}, {options.steps} steps ({options.warmup} warm-up), "
        f"{options.rounds} interleaved rounds, medians. "
        f"{facts['cores']} cores ({facts['processor']}), {facts['memory_bytes'] / GIB:.0f} GiB, {facts['file_system']}.",
        "",
        f"| contestant | step s (fastest) | / {summaries[0]['name']} (range) | tokens/s | CPU s (others') | peak GiB (steps) "
        "| / | read, written B per parameter | start, end s | loss difference |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in summaries:
        if row["status"] != "ok":
            lines.append(f"| {row['name']} | {row['status']} | | | | | | | | |")
            continue
        low, high = row.get("step_ratio_range", (NONE, NONE))
        lines.append(
            f"| {row['name']} | {row['step_seconds']:.2f} ({row['step_seconds_fastest']:.2f}) "
            f"| {row.get('step_ratio', NONE):.2f} ({low:.2f}-{high:.2f}) | {row['tokens_per_second']:.0f} "
            f"| {row['cpu_seconds']:.2f} ({row['others_cpu_seconds']:.2f}) "
            f"| {row['peak_anonymous_bytes'] / GIB:.2f} ({row['peak_anonymous_bytes_stepping'] / GIB:.2f}) "
            f"| {row.get('memory_ratio', NONE):.2f} "
            f"| {row['read_bytes_per_parameter']:.1f}, {row['written_bytes_per_parameter']:.1f} "
            f"| {row['start_up_seconds']:.1f}, {row['finish_seconds']:.1f} | {row['largest_loss_difference']:.5f} |"
        )
    compared = next((row["loss_compared_with"] for row in summaries if row["status"] == "ok"), "none")
    note = (
        f"Loss difference: the largest of the first ten steps, against {compared}. Peak: RssAnon + RssShmem, start-up included."
    )
    return "\n".join([*lines, "", note, ""])
