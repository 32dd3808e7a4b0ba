"""Headrace beside its peers at three sizes and two token counts, each with its aim.

Faster than DeepSpeed ZeRO-3 NVMe in a quarter of its memory; as fast as plain PyTorch that has all states in memory.
Each line is one comparison of `compare.py`, interleaved, with results of its own in OUTPUT/LINE.json and .md; OUTPUT/peers.md
has those of the command. The same command goes on after an interruption. DeepSpeed's lines need --deepspeed-python.
Run it whenever planning changes: forecasts cannot see a plan that is not in the space that is searched.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compare
from launch import GIB, measure_machine, scratch_directory
from summary import NONE
from worker import refuse

OURS = "headrace"
# Of DeepSpeed's memory at most; of plain PyTorch's speed at least (1.10 times its time).
MEMORY_AIM, PLAIN_AIM = 0.25, 1 / 1.10


@dataclass(frozen=True)
class Line:
    """One comparison. `host_memory` is Headrace's budget, about a fifth of what the peer takes; `aim` is times as fast."""

    peer: str
    size: str
    tokens_per_step: int
    sequence_length: int
    host_memory: str
    steps: int
    warmup: int
    aim: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.size}-{self.tokens_per_step}-{self.peer}"

    @property
    def needs_deepspeed(self) -> bool:
        return self.peer.startswith("deepspeed")


LINES = (
    Line("plain", "S", 2048, 512, "1.5GiB", 8, 2, PLAIN_AIM),
    Line("plain", "M", 4096, 512, "1.1GiB", 4, 2, PLAIN_AIM),
    Line("deepspeed-nvme", "S", 256, 256, "1.1GiB", 8, 2),
    Line("deepspeed-nvme", "S", 2048, 512, "1.3GiB", 6, 2),
    Line("deepspeed-nvme", "M", 256, 256, "1.4GiB", 6, 2),
    Line("deepspeed-nvme", "M", 2048, 512, "2GiB", 4, 1),
    Line("deepspeed-nvme", "L", 256, 256, "2.15GiB", 5, 1, 2.2),
    Line("deepspeed-nvme", "L", 2048, 512, "3GiB", 3, 1),
)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    names = ", ".join(line.name for line in LINES)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--only", default="", help=f"lines to run, with commas between them; of: {names}")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--profile", type=Path, default=None, help="of this machine; without it, it is measured first")
    parser.add_argument("--profile-seconds", type=float, default=90, help="seconds to measure the machine for")
    parser.add_argument("--deepspeed-python", type=Path, default=None, help="python of an environment with DeepSpeed")
    parser.add_argument("--scratch", type=Path, required=True, help="directory on the disk under test; nothing stays in it")
    parser.add_argument("--output", type=Path, required=True, help="directory for results")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> list[Line]:
    """Return the lines that the options name, or all that can be run."""
    known = {line.name: line for line in LINES}
    names = [name for name in options.only.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        refuse(f"--only: {unknown[0]!r} is none of {', '.join(known)}")
    if names:
        return [known[name] for name in dict.fromkeys(names)]
    return [line for line in LINES if options.deepspeed_python is not None or not line.needs_deepspeed]


def profile_of(options: argparse.Namespace) -> Path:
    """Return the profile by which Headrace plans all lines: given, measured before by the same command, or measured now."""
    kept = options.output / "profile.json"
    if options.profile is not None:
        if not options.profile.is_file():
            refuse(f"--profile {options.profile}: there is no such file; make one with `headrace bench machine`")
        return options.profile
    if not kept.exists():
        with scratch_directory(options.scratch) as scratch:
            measure_machine(scratch, kept, options.profile_seconds)
    return kept


def comparison_of(line: Line, options: argparse.Namespace, profile: Path) -> argparse.Namespace:
    """Return `compare.py`'s options for one line. Headrace is the first contestant: ratios are to it."""
    arguments = ["--contestants", f"{OURS},{line.peer}", "--size", line.size, "--rounds", str(options.rounds)]
    for name in ("tokens_per_step", "sequence_length", "steps", "warmup", "host_memory"):
        arguments += [f"--{name.replace('_', '-')}", str(getattr(line, name))]
    arguments += ["--profile", str(profile)]
    if options.deepspeed_python is not None:
        arguments += ["--deepspeed-python", str(options.deepspeed_python)]
    output = options.output / line.name
    return compare.options_of([*arguments, "--scratch", str(options.scratch), "--output", str(output)])


def row_of(line: Line, results: dict[str, Any]) -> str:
    """Return one line of the table from what `compare.py` wrote."""
    head = f"| {line.size}, {line.tokens_per_step}, {line.host_memory} | {line.peer} "
    ours, peer = results["summaries"]
    for summary in (ours, peer):
        if summary["status"] != "ok":
            return head + f"| {summary['name']}: {summary['status']} | | | | |"
    low, high = peer.get("step_ratio_range", (NONE, NONE))
    faster, memory = peer.get("step_ratio", NONE), 1 / peer.get("memory_ratio", NONE)
    loss = max(ours["largest_loss_difference"], peer["largest_loss_difference"])
    return (
        f"{head}| {_taken(peer)} | {_taken(ours)} "
        f"| **{faster:.2f}** ({low:.2f}-{high:.2f}; {line.aim:.2f}{_verdict(faster >= line.aim)}) "
        f"| {memory:.3f}{_aimed(memory) if line.needs_deepspeed else ''} | {loss:.1e} |"
    )


def _taken(summary: dict[str, Any]) -> str:
    return f"{summary['step_seconds']:.2f}, {summary['peak_anonymous_bytes'] / GIB:.2f}"


def _aimed(memory: float) -> str:
    return f" ({MEMORY_AIM}{_verdict(memory <= MEMORY_AIM)})"


def _verdict(reached: bool) -> str:
    return "" if reached else ", **short**"


def table_of(lines: list[Line], results: dict[str, dict[str, Any]]) -> str:
    """Return the Markdown table of the lines that have results."""
    done = [line for line in lines if line.name in results]
    facts = results[done[0].name]["machine"]
    rows = [
        f"{facts['cores']} cores ({facts['processor']}), {facts['memory_bytes'] / GIB:.0f} GiB, {facts['file_system']}. "
        "Medians of steps, then of interleaved rounds; peaks with start-up.",
        "",
        "| size, tokens a step, budget | peer | s a step, GiB | Headrace | times as fast (range; aim) | of its memory (aim) "
        "| losses differ by |",
        "|---|---|---|---|---|---|---|",
        *(row_of(line, results[line.name]) for line in done),
    ]
    return "\n".join([*rows, ""])


def _answers(results: dict[str, Any], asked: argparse.Namespace) -> bool:
    """Say whether results that are there are whole, and those of this very comparison."""
    options = json.loads(json.dumps(vars(asked), default=str))
    return "summaries" in results and _all_ok(results) and results["options"] | {"scratch": options["scratch"]} == options


def _all_ok(results: dict[str, Any]) -> bool:
    return all(run["status"] == "ok" for run in results["runs"])


def main() -> int:
    options = options_of()
    lines = chosen(options)
    if options.rounds < 1:
        refuse(f"--rounds {options.rounds} must be at least 1")
    if any(line.needs_deepspeed for line in lines):
        print(f"DeepSpeed {compare.check_deepspeed(options.deepspeed_python)}")
    elif not options.only:
        print("DeepSpeed is left out: give --deepspeed-python PATH (bench/README.md tells how to set it up)")
    options.output.mkdir(parents=True, exist_ok=True)
    profile = profile_of(options)
    results = {}
    for line in lines:
        kept, asked = options.output / f"{line.name}.json", comparison_of(line, options, profile)
        found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
        if _answers(found, asked):
            print(f"{line.name}: is there already", flush=True)
        else:
            print(f"{line.name}:", flush=True)
            found = compare.measure(asked)
        results[line.name] = found
        table = table_of(lines, results)
        (options.output / "peers.md").write_text(table, encoding="utf-8")
    print("\n" + table)
    return 0 if all(_all_ok(found) for found in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
