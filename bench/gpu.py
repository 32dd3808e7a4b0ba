"""Headrace on a GPU whose memory is capped to that of smaller cards, state on SSD and in host memory, beside plain PyTorch.

Every case runs in a process of its own, under its cap (torch's allocator is not given more). Writes OUTPUT.json, OUTPUT.md.
Ends in time: what does not fit into `--seconds` is listed as left out. Without a GPU it says so and ends with exit code 0.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from shapes import SHAPES, TokenStream

GIB = 1 << 30
HERE = Path(__file__).parent
# Bytes per parameter of two slots of weights and states, and a little for block inputs.
DISK_BYTES_PER_PARAMETER = 26
MOST_DISK_BYTES = 40e9

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One run: who (`headrace` or `plain`), where its states live (`ssd`, `host` or `device`), and the cap (0: none)."""

    contestant: str
    tier: str
    device_gib: int

    @property
    def name(self) -> str:
        return f"{self.contestant}, states on {self.tier}, " + (f"{self.device_gib} GiB" if self.device_gib else "no cap")


# In the order of what is wanted most, for the last ones may be left out.
CASES = (
    Case("headrace", "host", 8),
    Case("headrace", "ssd", 8),
    Case("plain", "device", 0),
    Case("headrace", "host", 24),
    Case("headrace", "host", 16),
    Case("plain", "device", 24),
    Case("headrace", "ssd", 24),
    Case("headrace", "ssd", 16),
)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True, help="directory on the disk under test; nothing stays in it")
    parser.add_argument("--output", type=Path, required=True, help="results go to OUTPUT.json and OUTPUT.md")
    parser.add_argument("--size", choices=list(SHAPES), default="L")
    parser.add_argument("--tokens-per-step", type=int, default=16384)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a case at most; one more warms up")
    parser.add_argument("--host-gib", type=int, default=8, help="host budget where the states lie on SSD")
    parser.add_argument("--host-state-gib", type=int, default=48, help="host budget where the states lie in host memory")
    parser.add_argument("--seconds", type=float, default=450, help="of the whole script")
    parser.add_argument("--case", default=None, help=argparse.SUPPRESS)  # JSON: what the script calls itself with
    parser.add_argument("--model", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    if not torch.cuda.is_available():
        print("bench-gpu: no CUDA device here; nothing was measured")
        return
    if options.case is not None:
        print(json.dumps(run_case(Case(**json.loads(options.case)), options)))
        return
    needed = SHAPES[options.size].parameters * DISK_BYTES_PER_PARAMETER
    free = shutil.disk_usage(options.scratch).free
    if needed > min(MOST_DISK_BYTES, free):
        sys.exit(
            f"size {options.size} takes {needed / 1e9:.1f} GB of disk; {free / 1e9:.1f} GB are free, 40 GB allowed: "
            "choose a smaller --size"
        )
    results = run_all(options)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.with_suffix(".json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    table = table_of(results)
    options.output.with_suffix(".md").write_text(table, encoding="utf-8")
    print(table)
    if any(row["status"] == "failed" for row in results["rows"]):
        sys.exit(1)


def run_all(options: argparse.Namespace) -> Row:
    """Make the model, measure the GPU's matrix rate, and run the cases until the time is up."""
    until = time.monotonic() + options.seconds
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="bench-gpu-") as scratch:
        model = Path(scratch) / "model"
        subprocess.run([sys.executable, HERE / "make_model.py", "--size", options.size, model], check=True)
        facts = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "size": options.size,
            "parameters": SHAPES[options.size].parameters,
            "tokens_per_step": options.tokens_per_step,
            "matrix_flops_per_second": matrix_rate(),
        }
        torch.cuda.empty_cache()
        for case in CASES:
            left = until - time.monotonic()
            row = run_process(case, model, Path(scratch), left, options) if left > 30 else {"status": "left out: no time"}
            rows.append({"name": case.name, **asdict(case), **row})
            print(f"{case.name}: {row['status']}", flush=True)
    return {**facts, "rows": rows}


def run_process(case: Case, model: Path, scratch: Path, left_seconds: float, options: argparse.Namespace) -> Row:
    """Run one case in a process of its own; its last line is its result."""
    directory = scratch / "run"
    directory.mkdir()
    passed = ("size", "tokens_per_step", "sequence_length", "steps", "host_gib", "host_state_gib")
    command = [sys.executable, str(Path(__file__)), "--scratch", str(directory), "--output", "-", "--model", str(model)]
    command += ["--case", json.dumps(asdict(case)), "--seconds", str(min(left_seconds, options.seconds / 4))]
    for name in passed:
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left_seconds)
    except subprocess.TimeoutExpired:
        return {"status": "left out: no time"}
    finally:
        shutil.rmtree(directory)
    if done.returncode:
        fits_not = "OutOfMemoryError" in done.stderr or "PlanInfeasible" in done.stderr
        return {"status": "does not fit" if fits_not else "failed", "log": done.stderr[-2000:]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def run_case(case: Case, options: argparse.Namespace) -> Row:
    """Train in this process; return medians over the timed steps."""
    return run_headrace(case, options) if case.contestant == "headrace" else run_plain(case, options)


def batches(options: argparse.Namespace) -> Iterable[torch.Tensor]:
    """Yield the batches of a warm-up step and of the timed ones, until the time is up (one timed step at least)."""
    stream, until = TokenStream(SHAPES[options.size].vocabulary), time.monotonic() + options.seconds
    rows = options.tokens_per_step // options.sequence_length
    for index in range(1 + options.steps):
        if index > 1 and time.monotonic() > until:
            return
        yield torch.from_numpy(stream.batch(index, sequences=rows, length=options.sequence_length))


def run_headrace(case: Case, options: argparse.Namespace) -> Row:
    """Train with the engine. States in host memory need deferred updates (clipping) and no checkpoint at every step."""
    import headrace
    from headrace.plan.value.words import explain_plan
    from headrace.terms.events import Event, OpDone

    operations: list[OpDone] = []

    def sink(event: Event) -> None:
        if isinstance(event, OpDone):
            operations.append(event)

    in_host = case.tier == "host"
    with headrace.Engine.open(
        options.model,
        headrace.Options(
            device_memory=case.device_gib * GIB,
            host_memory=(options.host_state_gib if in_host else options.host_gib) * GIB,
            learning_rate=1e-5,
            output=options.scratch / "state",
            tokens_per_step=options.tokens_per_step,
            sequence_length=options.sequence_length,
            max_grad_norm=1.0 if in_host else None,
            checkpoint_every=1000 if in_host else None,
        ),
        sink=sink,
    ) as engine:
        started = time.perf_counter()
        results, ends = [], []
        for tokens in batches(options):
            results.append(engine.step({"input_ids": tokens, "labels": tokens}))
            ends.append(time.perf_counter())
        plan = engine.plan
        assert plan is not None
    # Updates run on behind the next forward: a step is the time from its end to the end of the next.
    seconds = [stop - start for start, stop in zip([started, *ends], ends, strict=False)][1:]
    return {
        "status": "ok",
        "step_seconds": median(seconds),
        "seconds": seconds,
        "losses": [result.loss for result in results],
        "busy": busy_shares(operations, ends[0], ends[-1]),
        "ssd_read_bytes": median(result.bytes_read["ssd"] for result in results[1:]),
        "ssd_written_bytes": median(result.bytes_written["ssd"] for result in results[1:]),
        "device_peak_bytes": max(result.peak_bytes["device"] for result in results),
        "device_planned_bytes": plan.peak("device"),
        "host_peak_bytes": max(result.peak_bytes["host"] for result in results),
        "host_planned_bytes": plan.peak("host"),
        "states_in_memory": f"{len(plan.updates.resident_states)} of {len(plan.units)} units",
        "plan": explain_plan(plan),
    }


def busy_shares(operations: Iterable[Any], begin: float, end: float) -> dict[str, float]:
    """Return the share of `[begin, end)` in which each lane had an operation under way; a lane may have several at once."""
    lanes: dict[str, list[tuple[float, float]]] = {}
    for op in operations:
        start, stop = max(op.start_seconds, begin), min(op.stop_seconds, end)
        if stop > start:
            lanes.setdefault(str(op.lane), []).append((start, stop))
    shares = {}
    for lane, spans in lanes.items():
        covered, reached = 0.0, begin
        for start, stop in sorted(spans):
            covered += max(0.0, stop - max(start, reached))
            reached = max(reached, stop)
        shares[lane] = covered / (end - begin)
    return shares


def run_plain(case: Case, options: argparse.Namespace) -> Row:
    """Stock transformers with activation checkpointing, bf16 weights and gradients, fp32 masters and moments on the GPU."""
    from run_plain import MasterAdamW
    from transformers import AutoModelForCausalLM

    if case.device_gib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, case.device_gib * GIB / total))
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16, attn_implementation="sdpa").cuda().train()
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = MasterAdamW(list(model.parameters()), 1e-5)
    seconds: list[float] = []
    losses: list[float] = []
    for batch in batches(options):
        torch.cuda.synchronize()
        started, total_loss = time.perf_counter(), torch.zeros((), device="cuda")
        for micro in batch.cuda().split(1):
            loss = model(input_ids=micro, labels=micro).loss / batch.shape[0]
            loss.backward()
            total_loss += loss.detach()
        optimizer.step()
        losses.append(float(total_loss))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {
        "status": "ok",
        "step_seconds": median(seconds[1:]),
        "seconds": seconds[1:],
        "losses": losses,
        "device_peak_bytes": torch.cuda.max_memory_reserved(),
    }


def matrix_rate() -> float:
    """Return operations per second of a large bf16 product of random numbers: the peak that MFU is taken of."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.mm(left, right)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * 8192**3 / median(times[2:])


def table_of(results: Row) -> str:
    """Return the results as Markdown."""
    peak, tokens = results["matrix_flops_per_second"], results["tokens_per_step"]
    lines = [
        f"{results['gpu']}, torch {results['torch']}; {results['parameters'] / 1e6:.0f} million parameters, "
        f"{tokens} tokens per step; MFU is 6N over {peak / 1e12:.0f} TFLOP/s (a measured bf16 product)",
        "",
        "| case | s/step | tokens/s | MFU | GPU peak, planned GiB | host peak, planned GiB | GB read, written | lanes busy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        if row["status"] != "ok":
            lines.append(f"| {row['name']} | {row['status']} | | | | | | |")
            continue
        rate = tokens / row["step_seconds"]
        busy = ", ".join(
            f"{lane} {share:.0%}" for lane, share in sorted(row.get("busy", {}).items(), key=lambda item: -item[1])
        )
        lines.append(
            f"| {row['name']} | {row['step_seconds']:.2f} | {rate:.0f} | {6 * results['parameters'] * rate / peak:.1%} "
            f"| {in_gib(row, 'device')} | {in_gib(row, 'host')} "
            f"| {row.get('ssd_read_bytes', 0) / 1e9:.1f} / {row.get('ssd_written_bytes', 0) / 1e9:.1f} | {busy} |"
        )
    return "\n".join(lines) + "\n"


def in_gib(row: Row, tier: str) -> str:
    """Return measured and planned peak of a tier."""
    words = [f"{row[key] / GIB:.2f}" if (key := f"{tier}_{kind}_bytes") in row else "-" for kind in ("peak", "planned")]
    return " / ".join(words)


if __name__ == "__main__":
    main()
