"""Two workers and a node on a slow network: is a step as long as forecast, and does it hide the network behind compute?

    python bench/slow_link.py --scratch DISK [--megabits 200] [--flops 2.4e9] [--steps 6] [--out slow.json]      # as root

Each machine is a network namespace whose cable `tc` shapes (`tests/namespaces`). The device is a double: it computes with the
CPU and then sleeps until the operation has taken what the declared rate says. `late` is the share of compute by which
operations took longer than declared, because the CPU was slower or busy. The forecast is that of `headrace plan --workers 2`
for the same model, batch, link and declared profile; nothing of the run goes into it.

A step is the time from the first computation of a step to that of the next one, of the first worker, the median of all but the
first two. `compute` are the busy seconds of its compute lane. `network` are the seconds for which the fullest cable is full,
for the bytes that its lanes tell and the package's rule of what crosses which cable; `cable` is the same by the kernel's count
of bytes of the whole run, which also has the headers. Hidden is (compute + network - step) / min(compute, network).
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "namespaces")]

import node_processes  # noqa: E402
from network import Network, why_not  # noqa: E402

from headrace.flow.step import step as flow  # noqa: E402
from headrace.flow.step.step_state import StepState  # noqa: E402
from headrace.peers.meet.address import Address  # noqa: E402
from headrace.peers.node import links  # noqa: E402
from headrace.peers.node.planning import plan_cluster  # noqa: E402
from headrace.peers.node.run import serve  # noqa: E402
from headrace.peers.node.working import work  # noqa: E402
from headrace.plan.clock.machine_profiles import load_profile  # noqa: E402
from headrace.plan.clock.rates import Rates  # noqa: E402
from headrace.terms.lanes import Lane, Peer, lane_of_peer  # noqa: E402
from headrace.terms.machine.ceilings import Ceilings  # noqa: E402
from headrace.terms.options.options import Options  # noqa: E402
from headrace.terms.options.plan_options import PlanOptions  # noqa: E402
from headrace.terms.options.run_options import NodeOptions  # noqa: E402
from headrace.terms.program import Op  # noqa: E402

WORKERS, LENGTH, TOKENS, WARM_UP = 2, 64, 256, 2
SHAPE = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 10, "num_attention_heads": 6}
RUN: Mapping[str, Any] = {
    "tokens_per_step": TOKENS, "sequence_length": LENGTH, "max_grad_norm": 0, "compute_dtype": "bfloat16", "learning_rate": 1e-3
}  # fmt: skip
MEMORY, SECRET = "2GiB", b"of this bench"


def profiles(flops: float) -> tuple[Ceilings, Ceilings]:
    """Return the declared worker, whose matrix rate alone takes time, and the declared node: one core and one drive."""
    like = load_profile("luwu-node")
    drive = replace(like.drives[0], read_bytes_per_second=1e9, write_bytes_per_second=7e8, mixed_bytes_per_second=1e9)
    node = replace(
        like, name="declared node", cores=1, drives=(drive,), host_memory_bytes=2 << 30, update_bytes_per_second=5e9,
        update_bytes_per_second_per_core=5e9, host_memory_bytes_per_second=1e10,
    )  # fmt: skip
    return replace(node, name="declared worker", flops_per_second=dict.fromkeys(like.flops_per_second, flops)), node


class Double:
    """Makes the compute lane of this process as slow as `ceilings` declare, and notes (step, start, seconds, declared)."""

    def __init__(self, ceilings: Ceilings) -> None:
        self._rates = Rates(ceilings, str(RUN["compute_dtype"]), None, None)
        self.noted: list[tuple[int, float, float, float]] = []

    def slow(self, handler: Callable[[StepState, Op], None]) -> Callable[[StepState, Op], None]:
        """Return the handler of a verb, slowed where the operation computes."""

        def perform(state: StepState, op: Op) -> None:
            start = time.monotonic()
            handler(state, op)
            if op.lane is Lane.COMPUTE:
                declared = self._rates.alone_seconds(op)
                time.sleep(max(0.0, start + declared - time.monotonic()))
                self.noted.append((state.verdict.step, start, time.monotonic() - start, declared))

        return perform


def be_node(folder: str, listen: str, steps: int, flops: float) -> None:
    """Be the node, until the run is done."""
    place = Path(folder)
    own = {"model": place / "model", "data": [str(place / "data.jsonl")], "output": place / "run", "cache": place / "cache"}
    more = {"listen": listen, "secret": place / "secret", "workers": WORKERS, "max_steps": steps, "host_memory": MEMORY}
    serve(NodeOptions.of({**RUN, **own, **more, "machine": profiles(flops)[1]}), display=node_processes.Words())


def be_worker(folder: str, host: str, port: int, rank: int, flops: float) -> None:
    """Be a worker with a slow device, and leave what it noted in a file."""
    worker = profiles(flops)[0]
    double = Double(worker)
    flow.HANDLERS.update({verb: double.slow(handler) for verb, handler in flow.HANDLERS.items()})
    work(Address(host, port), Options(host_memory=MEMORY, machine=worker), name=str(rank), wait_seconds=60.0, secret=SECRET)
    Path(folder, f"noted-{rank}.json").write_text(json.dumps(double.noted), encoding="utf-8")


def measure(
    folder: Path, megabits: float, flops: float, steps: int
) -> tuple[list[list[Any]], list[dict[str, Any]], list[tuple[int, int]]]:
    """Run; return what the first worker noted, the lines of lanes, and the bytes that each machine, the node first, sent and
    received in the whole run.
    """
    with Network(1 + WORKERS, megabits=megabits) as network:
        host, port = network.address(0), 29500

        def start(machine: int, *arguments: Any) -> Any:
            role = "be_worker" if machine else "be_node"
            code = f"import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import slow_link; "
            code += f"slow_link.{role}(*map(json.loads, sys.argv[1:]))"
            with (folder / f"{machine}.log").open("w", encoding="utf-8") as log:
                return network.start(machine, "-c", code, *map(json.dumps, (str(folder), *arguments)), stdout=log)

        processes = [start(0, f"{host}:{port}", steps, flops)]
        processes += [start(rank, host, port, rank, flops) for rank in range(1, WORKERS + 1)]
        for number, process in enumerate(processes):
            if process.wait(230):
                raise SystemExit((folder / f"{number}.log").read_text(encoding="utf-8"))
        moved = [network.moved(rank) for rank in range(1 + WORKERS)]
    noted = json.loads((folder / "noted-1.json").read_text(encoding="utf-8"))
    lines = (folder / "run" / "lanes.jsonl").read_text(encoding="utf-8").splitlines()
    return noted, list(map(json.loads, lines)), moved


def figures(
    noted: list[list[Any]], lanes: list[dict[str, Any]], network: links.Network, planned_seconds: float
) -> dict[str, float]:
    """Return medians over steps, those of warming up left out, and what follows of them."""
    begins: dict[int, float] = {}
    computed: dict[int, float] = {}
    declared: dict[int, float] = {}
    for step, start, seconds, asked in noted:
        begins[step] = min(start, begins.get(step, start))
        computed[step] = computed.get(step, 0.0) + seconds
        declared[step] = declared.get(step, 0.0) + asked
    # The last step is left out, too: no other one begins after it.
    numbers = [step for step in sorted(begins) if step >= WARM_UP][:-1]
    measured = [begins[step] for step in sorted(begins)][WARM_UP:]
    step_seconds = statistics.median(after - before for before, after in pairwise(measured))
    moved = {
        lane: statistics.median(
            line["lanes"].get(lane_of_peer(Peer.WORKER, 1, lane), {}).get("bytes", 0) for line in lanes[WARM_UP:-1]
        )
        for lane in (Lane.NIC_DOWN, Lane.NIC_UP)
    }  # fmt: skip
    # A worker's lane tells a float32 gradient; the rule counts a copy as it comes to the node, rounded.
    moved[Lane.NIC_UP] /= network.widening
    compute, crossed = statistics.median(computed[step] for step in numbers), network.busy_seconds(moved)
    return {
        "step": step_seconds,
        "planned": planned_seconds,
        "over_forecast": step_seconds / planned_seconds,
        "compute": compute,
        "late": compute / statistics.median(declared[step] for step in numbers) - 1,
        "network": crossed,
        "hidden": (compute + crossed - step_seconds) / min(compute, crossed),
        "down_bytes": moved[Lane.NIC_DOWN],
        "up_bytes": moved[Lane.NIC_UP],
        "steps": len(numbers),
    }


def cable_options(description: str | None) -> argparse.ArgumentParser:
    """Return the options of a bench on slow cables."""
    arguments = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--scratch", type=Path, required=True)
    arguments.add_argument("--megabits", type=float, default=200.0)
    arguments.add_argument("--flops", type=float, default=2.4e9, help="declared FLOP/s of each worker's device")
    arguments.add_argument("--steps", type=int, default=6)
    arguments.add_argument("--out", type=Path)
    return arguments


def read_options(arguments: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the options that were given; end where no network can be made."""
    given = arguments.parse_args()
    if (words := why_not()) is not None:
        arguments.error(f"{words}; run it as root on a machine that makes them")
    return given


def main() -> None:
    """Print a table, and write it as JSON where asked."""
    arguments = cable_options(__doc__)
    given = read_options(arguments)
    if given.steps < WARM_UP + 2:
        arguments.error(f"--steps: {given.steps} of which {WARM_UP} warm up and the last one has no end; give {WARM_UP + 2}")
    folder = given.scratch / "headrace-slow-link"
    folder.mkdir(parents=True)
    try:
        node_processes.write_model(folder, **SHAPE)
        (folder / "secret").write_bytes(SECRET)
        worker, node = profiles(given.flops)
        asked = {"workers": WORKERS, "node_ssds": 1, "link": f"{given.megabits}Mbit", "host_memory": MEMORY}
        options = PlanOptions.of({**RUN, **asked, "machine": worker, "node_machine": node})
        report = plan_cluster(folder / "model", options)
        planned = report.forecast
        if planned is None:
            raise SystemExit(f"it does not fit: {report.reason}")
        noted, lanes, moved = measure(folder, given.megabits, given.flops, given.steps)
        found = figures(noted, lanes, planned.cluster.network, planned.step_seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found["cable"] = max(received for _, received in moved[1:]) * 8 / (given.megabits * 1e6) / given.steps
    found |= {"parameters": report.parameters, "megabits": given.megabits, "declared_flops": given.flops}
    found["load"] = os.getloadavg()[0]
    print("the device is a double: it computes, and then sleeps to the declared rate")
    for name, value in found.items():
        print(f"{name:>15} {value:,.3f}")
    if given.out:
        given.out.write_text(
            json.dumps({"device": "double: computes, then sleeps", **found}, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
