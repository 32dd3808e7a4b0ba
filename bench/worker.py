"""What every contestant shares: its arguments, the loop that takes its steps, and what is measured inside its process.

Invariant: a contestant decides how a step is computed and nothing else. Wall and CPU seconds, bytes and losses are taken here,
in the same way for all. Peak memory is sampled from outside (see `launch.py`): a thread inside would wait for the GIL.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from os import sysconf
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from shapes import SHAPES, TokenStream

# One optimizer step: takes the batch (int64, sequences x length), returns its loss and what else is worth recording.
Step = Callable[[np.ndarray], tuple[float, dict[str, Any]]]


def refuse(message: str) -> NoReturn:
    """Say what is wrong with the command and leave with exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the argument parser of a worker, to which a contestant may add options of its own."""
    arguments = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    arguments.add_argument("--size", choices=list(SHAPES), default="S", help="shape of the model, see shapes.py")
    arguments.add_argument("--model", type=Path, required=True, help="directory that make_model.py wrote")
    arguments.add_argument("--scratch", type=Path, required=True, help="empty directory on the disk under test")
    arguments.add_argument("--result", type=Path, required=True, help="JSON file to write")
    arguments.add_argument("--tokens-per-step", type=int, default=2048)
    arguments.add_argument("--sequence-length", type=int, default=512)
    arguments.add_argument("--micro-batch", type=int, default=0, help="sequences per forward; 0: at most 2048 tokens at a time")
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--warmup", type=int, default=1, help="first steps, left out of the totals")
    arguments.add_argument("--learning-rate", type=float, default=1e-5)
    arguments.add_argument("--threads", type=int, default=0, help="compute threads; 0: what the library chooses")
    arguments.add_argument(
        "--checkpointing", action=argparse.BooleanOptionalAction, default=True, help="activation checkpointing"
    )
    return arguments


@dataclass(frozen=True)
class Task:
    """One training task: steps of `sequences` x `length` tokens, `micro_batch` sequences in a forward."""

    sequences: int
    length: int
    micro_batch: int
    steps: int
    warmup: int
    vocabulary: int

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Task":
        """Check the options; leaves with exit code 2 if the tokens cannot be cut evenly."""
        length, tokens = options.sequence_length, options.tokens_per_step
        if length < 2 or tokens < length or tokens % length:
            refuse(f"--tokens-per-step {tokens} is not a multiple of --sequence-length {length}")
        sequences = tokens // length
        at_most = max(1, 2048 // length)
        micro_batch = options.micro_batch or max(n for n in range(1, at_most + 1) if sequences % n == 0)
        if sequences % micro_batch:
            refuse(f"--micro-batch {micro_batch} does not divide the {sequences} sequences of a step")
        if not 0 <= options.warmup < options.steps:
            refuse(f"--warmup {options.warmup} leaves nothing of --steps {options.steps}")
        return cls(sequences, length, micro_batch, options.steps, options.warmup, SHAPES[options.size].vocabulary)


@dataclass(frozen=True)
class Counters:
    """What a process has used so far. Bytes are those that reached the block layer, so hits in the page cache do not count."""

    clock_seconds: float
    cpu_seconds: float
    machine_cpu_seconds: float
    read_bytes: int
    written_bytes: int

    @classmethod
    def now(cls) -> "Counters":
        """Read the clocks and /proc."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="utf-8").splitlines())
        user, nice, system, _idle, _wait, irq, softirq, steal = map(
            int, Path("/proc/stat").read_text(encoding="utf-8").split()[1:9]
        )
        return cls(
            clock_seconds=time.monotonic(),  # one clock for all processes of a Linux machine: launch.py relies on it
            cpu_seconds=usage.ru_utime + usage.ru_stime,
            machine_cpu_seconds=(user + nice + system + irq + softirq + steal) / sysconf("SC_CLK_TCK"),
            read_bytes=int(fields["read_bytes"]),
            written_bytes=int(fields["write_bytes"]),
        )

    def until(self, later: "Counters") -> dict[str, float]:
        """Return what was used between here and `later`. `others_cpu_seconds` near 0 means that the machine was quiet."""
        cpu = later.cpu_seconds - self.cpu_seconds
        return {
            "seconds": later.clock_seconds - self.clock_seconds,
            "cpu_seconds": cpu,
            "others_cpu_seconds": later.machine_cpu_seconds - self.machine_cpu_seconds - cpu,
            "read_bytes": later.read_bytes - self.read_bytes,
            "written_bytes": later.written_bytes - self.written_bytes,
        }


@dataclass
class Record:
    """What a worker writes: one row per step, and totals over the steps after the warm-up."""

    contestant: str
    versions: dict[str, str]
    settings: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)
    finish_seconds: float = 0.0


def measure(task: Task, step: Step, *, finish: Callable[[], None], record: Record) -> Record:
    """Take the steps of `task` and measure each.

    A system may let work of step t run on into step t+1. The totals over the steps after the warm-up are still fair: they
    contain what the last warm-up step left over in place of what the last step leaves over; `finish_seconds` is that rest.
    """
    stream = TokenStream(task.vocabulary)
    window = Counters.now()
    for number in range(task.steps):
        batch = stream.batch(number, sequences=task.sequences, length=task.length)
        before = Counters.now()
        if number == task.warmup:
            window = before
        loss, extra = step(batch)
        after = Counters.now()
        clocks = {"start_clock": before.clock_seconds, "stop_clock": after.clock_seconds}
        record.rows.append({"step": number, "loss": loss, **before.until(after), **clocks, **extra})
        print(f"step {number}: loss {loss:.5f}, {record.rows[-1]['seconds']:.2f} s", flush=True)
    record.totals = window.until(Counters.now())
    finish_start = time.monotonic()
    finish()
    record.finish_seconds = time.monotonic() - finish_start
    return record


def write(record: Record, path: Path) -> None:
    """Write the record as JSON."""
    path.write_text(json.dumps(asdict(record), indent=1, default=str), encoding="utf-8")
