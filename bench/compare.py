"""Headrace beside plain PyTorch and DeepSpeed ZeRO-3, interleaved: A B C A B C, each run in its own process.

Writes a JSON file with every step of every run, and a Markdown table of medians and of ratios within rounds. Ends with exit
code 1 if a run failed, 2 if the command was wrong.
"""

import argparse
import json
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from sys import executable
from typing import Any

from launch import HERE, environment, machine_facts, make_model, require_disk, run_worker, scratch_directory
from shapes import SHAPES
from summary import Run, progress_line, summaries_of, table_of
from worker import refuse


@dataclass(frozen=True)
class Contestant:
    """A worker script with its arguments, and the bytes of scratch space that it needs per parameter."""

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    disk_bytes_per_parameter: int = 0

    @property
    def needs_deepspeed(self) -> bool:
        return self.script == "run_deepspeed.py"


# DeepSpeed is faster without activation checkpointing (fewer reads of the weights) and smaller with it: both are its due.
# Its "lean" buffers hold the largest parameter and no more; the others are the size that its examples use.
ROOMY = ("--buffer-elements", "1e8", "--sub-group-elements", "1e8")
FAST = (*ROOMY, "--no-checkpointing")
KNOWN = [
    Contestant("headrace", "run_headrace.py", (), 26),
    Contestant("plain", "run_plain.py"),
    Contestant("plain-no-checkpointing", "run_plain.py", ("--no-checkpointing",)),
    Contestant("deepspeed-nvme", "run_deepspeed.py", FAST, 18),
    Contestant("deepspeed-nvme-checkpointing", "run_deepspeed.py", ROOMY, 18),
    Contestant("deepspeed-nvme-lean", "run_deepspeed.py", ("--parameter-buffers", "4", "--no-pin"), 18),
    Contestant("deepspeed-nvme-pipeline", "run_deepspeed.py", (*FAST, "--pipeline", "--state-buffers", "12"), 18),
    Contestant("deepspeed-cpu", "run_deepspeed.py", (*FAST, "--states", "cpu", "--parameters", "cpu")),
]


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    names = ", ".join(contestant.name for contestant in KNOWN)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--contestants", default="headrace,plain,deepspeed-nvme", help=f"the first is the reference; of: {names}"
    )
    parser.add_argument(
        "--variant", action="append", default=[], metavar="'NAME=CONTESTANT OPTION...'", help="a contestant with more options"
    )
    parser.add_argument("--size", choices=list(SHAPES), default="S")
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=0, help="sequences per forward; 0: at most 2048 tokens at a time")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=1, help="steps left out of medians")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--host-memory", default="4GiB", help="Headrace's host budget")
    parser.add_argument(
        "--profile", type=Path, default=None, help="of this machine, by which Headrace plans; none: a nominal one"
    )
    parser.add_argument("--deepspeed-python", type=Path, default=None, help="python of an environment with DeepSpeed")
    parser.add_argument("--omp-wait-policy", choices=["passive", "active"], default="passive", help="the same for all")
    parser.add_argument("--timeout-seconds", type=float, default=3600, help="of one run")
    parser.add_argument("--scratch", type=Path, required=True, help="directory on the disk under test; nothing stays in it")
    parser.add_argument("--output", type=Path, required=True, help="results go to OUTPUT.json and OUTPUT.md")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> list[Contestant]:
    """Return the contestants that the options name, variants included."""
    known = {contestant.name: contestant for contestant in KNOWN}
    for text in options.variant:
        name, _, rest = text.partition("=")
        base, *extra = shlex.split(rest) or [""]
        if base not in known:
            refuse(f"--variant {text!r}: {base!r} is none of {', '.join(known)}")
        known[name] = replace(known[base], name=name, arguments=known[base].arguments + tuple(extra))
    names = options.contestants.split(",") + [text.partition("=")[0] for text in options.variant]
    for name in names:
        if name not in known:
            refuse(f"--contestants: {name!r} is none of {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


def check_deepspeed(python: Path | None) -> str:
    """Return DeepSpeed's version in `python`; leaves with exit code 2 if it is not there."""
    how = "give --deepspeed-python PATH (bench/README.md tells how to set it up), or leave DeepSpeed out with --contestants"
    if python is None:
        refuse(f"DeepSpeed is to be measured, but its Python is not known: {how}")
    command = [str(python), "-c", "import importlib.metadata as m; print(m.version('deepspeed'))"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        refuse(f"--deepspeed-python {python} cannot be run ({error.strerror}): {how}")
    if found.returncode:
        refuse(f"--deepspeed-python {python} has no DeepSpeed: {how}")
    return found.stdout.strip()


def command_of(contestant: Contestant, options: argparse.Namespace, model: Path) -> list[str]:
    """Return the command that runs `contestant`, but for its scratch directory and result file."""
    python = str(options.deepspeed_python) if contestant.needs_deepspeed else executable
    command = [python, str(HERE / contestant.script), "--model", str(model), "--size", options.size]
    for name in ("tokens_per_step", "sequence_length", "micro_batch", "steps", "warmup", "learning_rate", "threads"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    if contestant.script == "run_headrace.py":
        command += ["--host-memory", options.host_memory]
        if options.profile is not None:
            command += ["--machine", str(options.profile)]
    return command + list(contestant.arguments)  # last, so that a variant's options win


def all_runs(contestants: list[Contestant], options: argparse.Namespace, scratch: Path) -> Iterator[Run]:
    """Run the rounds and yield one record per run."""
    ours = environment(omp_wait_policy=options.omp_wait_policy)
    model = scratch / "model"
    make_model(options.size, model, ours)
    for number in range(options.rounds):
        for contestant in contestants:
            variables = ours
            if contestant.needs_deepspeed:
                variables = environment(omp_wait_policy=options.omp_wait_policy, python=options.deepspeed_python)
            command = command_of(contestant, options, model)
            run = run_worker(command, variables, scratch=scratch, timeout_seconds=options.timeout_seconds)
            yield {"name": contestant.name, "round": number, **run}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the comparison; return what the JSON file has: machine, options, runs, and summaries in the contestants' order."""
    contestants = chosen(options)
    if options.warmup >= options.steps or options.rounds < 1:
        refuse(f"--steps {options.steps} must be more than --warmup {options.warmup}, and --rounds {options.rounds} at least 1")
    if any(contestant.needs_deepspeed for contestant in contestants):
        print(f"DeepSpeed {check_deepspeed(options.deepspeed_python)}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    json_file = Path(f"{options.output}.json")
    with scratch_directory(options.scratch) as scratch:
        bytes_per_parameter = 2 + max(contestant.disk_bytes_per_parameter for contestant in contestants)
        require_disk(scratch, bytes_per_parameter * SHAPES[options.size].parameters, f"size {options.size}")
        facts = machine_facts(scratch)
        written = {"machine": facts, "options": vars(options), "runs": []}
        for run in all_runs(contestants, options, scratch):
            print(progress_line(run, options.warmup), flush=True)
            written["runs"].append(run)
            json_file.write_text(
                json.dumps(written, indent=1, default=str), encoding="utf-8"
            )  # an hour's runs outlive an interruption
    written["summaries"] = summaries_of([contestant.name for contestant in contestants], written["runs"], options)
    json_file.write_text(json.dumps(written, indent=1, default=str), encoding="utf-8")
    table = table_of(written["summaries"], options, facts)
    Path(f"{options.output}.md").write_text(table, encoding="utf-8")
    print("\n" + table)
    return written


def main() -> int:
    return 0 if all(run["status"] == "ok" for run in measure(options_of())["runs"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
