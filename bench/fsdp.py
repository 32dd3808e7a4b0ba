"""A node and two workers beside plain FSDP2 with CPU offload, on the same slow network: tokens per second, bytes, losses.

    python bench/fsdp.py --scratch DISK [--megabits 200] [--flops 2.4e9] [--steps 6] [--rounds 3] [--out fsdp.json]   # root

Model, rows, optimizer, cables and device double are those of `slow_link.py`. FSDP2 is `fully_shard` of each block and of the
model over two machines without a node, gloo, `CPUOffloadPolicy`, float32 masters, computing and summing gradients in bfloat16,
torch's AdamW; with and without recomputation of blocks in backward. Each run is a new network and new processes; kinds take
turns, figures are medians of rounds. A step is the time from its begin to that of the next one, the median of all but the first
two and the last. Bytes are the kernel's, of the whole run over its steps. Losses are compared step by step.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import slow_link
import torch
from node_processes import write_model
from slow_link import LENGTH, RUN, SECRET, TOKENS, WARM_UP, WORKERS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "namespaces"))
from network import Network

from headrace.data.batches.open_data import open_stream, step_tensors_of
from headrace.plan.clock.rates import Rates
from headrace.store.run_directory import RunDirectory

KINDS = ("headrace", "fsdp", "fsdp, blocks recomputed")


class _Begin(torch.autograd.Function):
    """The identity at a layer's input: where its backward ends, which is made to last as declared."""

    @staticmethod
    def forward(context: Any, hidden: torch.Tensor, pace: "_Pace") -> torch.Tensor:
        context.pace = pace
        if not pace.goes_back:
            pace.start = time.monotonic()
        return hidden.view_as(hidden)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.pace.sleep(context.pace.backward_times)
        context.pace.goes_back = False
        return gradient, None


class _End(torch.autograd.Function):
    """The identity at a layer's output: where its forward ends, which is made to last as declared, and its backward begins."""

    @staticmethod
    def forward(context: Any, hidden: torch.Tensor, pace: "_Pace") -> torch.Tensor:
        context.pace = pace
        if not pace.goes_back:
            pace.sleep(1.0)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.pace.start, context.pace.goes_back = time.monotonic(), True
        return gradient, None


class _Pace:
    """Makes a layer's forward take `seconds`, and its backward `backward_times` that, a recomputed forward inside of it; `late`
    adds up what they took longer.
    """

    def __init__(self, layer: torch.nn.Module, seconds: float, backward_times: float = 2.0) -> None:
        self.start, self.late, self.goes_back, self.backward_times = 0.0, 0.0, False, backward_times
        self._seconds, self._forward = seconds, layer.forward
        layer.forward = self.forward  # inside of what FSDP hangs on the layer: what it waits for is not computing

    def forward(self, hidden: torch.Tensor, *arguments: Any, **more: Any) -> Any:
        return _End.apply(self._forward(_Begin.apply(hidden, self), *arguments, **more), self)

    def sleep(self, times: float) -> None:
        """Sleep until `times` the declared seconds have passed since `start`."""
        left = self.start + times * self._seconds - time.monotonic()
        self.late -= min(0.0, left)
        time.sleep(max(0.0, left))


def be_rank(
    folder: str,
    host: str,
    rank: int,
    steps: int,
    recompute: bool,
    seconds: dict[str, float],
    ranks: int = WORKERS,
    interface: str = "eth0",
    threads: int = 1,
) -> None:
    """Train with FSDP2 on this rank's rows, and leave step begins, losses, lateness and the largest resident size in a file.
    Without `seconds` layers take the time that they take.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group("gloo", init_method=f"tcp://{host}:29600", rank=rank, world_size=ranks)
    model = AutoModelForCausalLM.from_pretrained(Path(folder, "model"), dtype=torch.float32)
    model.config.use_cache = False
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    policy = {
        "mesh": init_device_mesh("cpu", (ranks,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    paces = [_Pace(layer, seconds["block"], 3.0 if recompute else 2.0) for layer in model.model.layers if seconds]
    paces += [_Pace(model.lm_head, seconds["head"])] if seconds else []
    for layer in model.model.layers:
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=float(RUN["learning_rate"]), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    begins, losses, updates = [], [], []
    for step in range(steps):
        begins.append(time.monotonic())
        with np.load(Path(folder, f"batch-{step}.npz")) as batch:
            rows = {name: torch.from_numpy(batch[name]) for name in ("input_ids", "labels", "position_ids") if name in batch}
        trained = int((rows["labels"][:, 1:] != -100).sum())
        own = {name: each.chunk(ranks)[rank] for name, each in rows.items()}
        loss = model(**own, use_cache=False, num_items_in_batch=trained).loss
        (ranks * loss).backward()  # ranks' gradients are averaged
        before = time.monotonic()
        optimizer.step()
        updates.append(time.monotonic() - before)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    found = {"begins": begins, "losses": losses, "updates": updates, "late": sum(pace.late for pace in paces)}
    found["resident_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def step_seconds(begins: list[float]) -> float:
    """Return the median of steps, those of warming up left out."""
    return statistics.median(after - before for before, after in pairwise(begins[WARM_UP:]))


def run_headrace(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Run a node and its workers; leave the rows of each step in files."""
    noted, _, moved = slow_link.measure(folder, given.megabits, given.flops, given.steps)
    begins: dict[int, float] = {}
    for step, start, _, _ in noted:
        begins[step] = min(start, begins.get(step, start))
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    leave_batches(folder, given.steps)
    shutil.rmtree(folder / "run")
    computed = sum(seconds for step, _, seconds, _ in noted if step >= WARM_UP) / (given.steps - WARM_UP)
    return {
        "step": step_seconds([begins[step] for step in sorted(begins)]),
        "compute": computed,
        "losses": [json.loads(line)["loss"] for line in lines],
        "moved": moved,
    }


def leave_batches(folder: Path, steps: int) -> None:
    """Leave the rows of each step of the run in `folder` in files."""
    stream = open_stream(RunDirectory(folder / "run").read_config())
    for step in range(steps):
        arrays = {name: each.numpy() for name, each in step_tensors_of(stream.next_batch()).items()}
        np.savez(folder / f"batch-{step}.npz", **arrays)


def run_fsdp(folder: Path, given: argparse.Namespace, recompute: bool) -> dict[str, Any]:
    """Run FSDP2 on two machines."""
    with Network(WORKERS, megabits=given.megabits) as network:
        processes = []
        for rank in range(WORKERS):
            code = f"import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import fsdp; "
            code += "fsdp.be_rank(*map(json.loads, sys.argv[1:]))"
            words = (str(folder), network.address(0), rank, given.steps, recompute, declared(given.flops))
            with (folder / f"fsdp-{rank}.log").open("w", encoding="utf-8") as log:
                processes.append(network.start(rank, "-c", code, *map(json.dumps, words), stdout=log))
        for rank, process in enumerate(processes):
            if process.wait(230):
                raise SystemExit((folder / f"fsdp-{rank}.log").read_text(encoding="utf-8"))
        moved = [network.moved(rank) for rank in range(WORKERS)]
    found = [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(WORKERS)]
    took, blocks = declared(given.flops), slow_link.SHAPE["num_hidden_layers"]
    return {
        "step": step_seconds(found[0]["begins"]),
        "compute": took["block"] * blocks * (4 if recompute else 3) + took["head"] * 3,
        "update": statistics.median(found[0]["updates"][WARM_UP:]),
        "late": max(each["late"] for each in found) / given.steps,
        "losses": [sum(each) for each in zip(*(each["losses"] for each in found), strict=True)],
        "moved": moved,
    }


def declared(flops: float) -> dict[str, float]:
    """Return the seconds that a block's and the head's forward of one rank's rows take on the declared device."""
    rates = Rates(slow_link.profiles(flops)[0], str(RUN["compute_dtype"]), None, None)
    hidden, wide = slow_link.SHAPE["hidden_size"], slow_link.SHAPE["intermediate_size"]
    tokens = TOKENS // WORKERS
    block = 2 * (4 * hidden**2 + 3 * hidden * wide) * tokens + 4 * LENGTH * hidden * tokens
    return {"block": rates.compute_seconds(block, 0), "head": rates.compute_seconds(2 * 384 * hidden * tokens, 0)}


def main() -> None:
    """Print a table, and write it as JSON where asked."""
    arguments = slow_link.cable_options(__doc__)
    arguments.add_argument("--rounds", type=int, default=3)
    given = slow_link.read_options(arguments)
    folder = given.scratch / "headrace-fsdp"
    folder.mkdir(parents=True)
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    try:
        write_model(folder, **slow_link.SHAPE)
        (folder / "secret").write_bytes(SECRET)
        for number in range(given.rounds):
            for kind in KINDS:
                one = run_headrace(folder, given) if kind == KINDS[0] else run_fsdp(folder, given, kind == KINDS[2])
                found[kind].append(one)
                print(f"round {number + 1}, {kind}: {one['step']:.3f} s a step, last loss {one['losses'][-1]:.4f}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(found, given)
    if given.out:
        record = {"options": vars(given), "rounds": found}
        given.out.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")


def show(found: dict[str, list[dict[str, Any]]], given: argparse.Namespace) -> None:
    """Print a row for each kind: medians of rounds, and the largest difference of a loss from Headrace's first round."""
    print(f"the device is a double: it computes, and then sleeps to the declared rate; load {os.getloadavg()[0]:.0f}")
    print("| kind | s a step | of it compute | tokens/s | MB sent, received a step by each machine | largest loss difference |")
    print("|---|---|---|---|---|---|")
    ours = found[KINDS[0]][0]["losses"]
    for kind, rounds in found.items():
        seconds, compute = (statistics.median(each[name] for each in rounds) for name in ("step", "compute"))
        moved = "; ".join(
            f"{sent / given.steps / 1e6:.1f}, {came / given.steps / 1e6:.1f}" for sent, came in rounds[0]["moved"]
        )
        off = max(abs(loss - own) for each in rounds for loss, own in zip(each["losses"], ours, strict=True))
        print(f"| {kind} | {seconds:.3f} | {compute:.3f} | {TOKENS / seconds:.2f} | {moved} | {off:.5f} |")
    late, update = (max(each[name] for kind in KINDS[1:] for each in found[kind]) for name in ("late", "update"))
    print(f"FSDP2's layers were late by {late:.3f} s a step at most, its optimizer took {update:.3f} s at most")


if __name__ == "__main__":
    main()
