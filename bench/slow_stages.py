"""Stages of unlike machines over a slow link: are they as busy as their fill and drain allow?

    python bench/slow_stages.py --scratch DISK [--megabits 100] [--flops 2.4e9] [--steps 5] [--stages 3] [--out found.json]

Run it as root. Each stage is a network namespace, and its device the double of `slow_link.py`, so `--flops` are declared, not
measured. The first stage is declared twice as fast as the others, and has twice their blocks. A stage measures its own compute,
and its messages the link. The most that the slowest stage can be busy is G t / (G t + (S-1)(t + 2c)), by the measured t and c;
`share` is what it was, divided by that. The first step is left out, in which kernels compile.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "namespaces")]

import node_processes  # noqa: E402
import slow_link  # noqa: E402
from network import Network  # noqa: E402

from headrace.flow.step import step as flow  # noqa: E402
from headrace.peers.stages.run import Staging, follow_as_stage, train_in_stages  # noqa: E402
from headrace.terms.options.options import Options  # noqa: E402
from headrace.terms.options.run_options import RunOptions  # noqa: E402

PORT, LENGTH, ROWS = 29500, 64, 64
SHAPE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}


def be_stage(folder: str, addresses: str, stage: int, flops: float, steps: int, cuts: list[int]) -> None:
    """Be a stage with a slow device, until the run ends."""
    place, machine = Path(folder), slow_link.profiles(flops)[0]
    double = slow_link.Double(machine)
    flow.HANDLERS.update({verb: double.slow(handler) for verb, handler in flow.HANDLERS.items()})
    staging = Staging.of(addresses, stage, place / "secret", 60.0)
    if stage:
        follow_as_stage(Options(host_memory=slow_link.MEMORY, machine=machine, ssd=str(place / f"ssd{stage}")), staging)
        return
    own = {"model": place / "model", "data": [str(place / "data.jsonl")], "output": place / "run", "cache": place / "cache"}
    more = {"host_memory": slow_link.MEMORY, "machine": machine, "max_steps": steps, "cuts": cuts}
    step = {"tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH}
    train_in_stages(RunOptions.of({**slow_link.RUN, **own, **more, **step}), staging)


def measure(folder: Path, megabits: float, flops: float, steps: int, stages: int) -> dict[str, Any]:
    """Run, and return what the run's summary says of its stages."""
    cuts = [2 + number for number in range(stages - 1)]
    with Network(stages, megabits=megabits) as network:
        addresses = ",".join(f"{network.address(number)}:{PORT}" for number in range(stages))
        code = f"import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import slow_stages; "
        code += "slow_stages.be_stage(*map(json.loads, sys.argv[1:]))"
        processes = []
        for number in range(stages):
            own = (str(folder), addresses, number, flops / (2 if number else 1), steps, cuts)
            with (folder / f"{number}.log").open("w", encoding="utf-8") as log:
                processes.append(network.start(number, "-c", code, *map(json.dumps, own), stdout=log))
        for number, process in enumerate(processes):
            if process.wait(500):
                said = (folder / f"{number}.log").read_text(encoding="utf-8")
                raise SystemExit(f"stage {number} ended with {process.returncode}: {said}")
    found: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))["stages"]
    return found


def main() -> None:
    """Print the figures, and write them as JSON where asked."""
    arguments = slow_link.cable_options(__doc__)
    arguments.add_argument("--stages", type=int, default=3)
    arguments.set_defaults(megabits=100.0)
    given = slow_link.read_options(arguments)
    folder = given.scratch / "headrace-slow-stages"
    folder.mkdir(parents=True)
    try:
        node_processes.write_model(folder, **SHAPE, num_hidden_layers=given.stages + 1)
        node_processes.write_texts(folder, samples=2000)
        (folder / "secret").write_bytes(slow_link.SECRET)
        found = measure(folder, given.megabits, given.flops, given.steps, given.stages)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found["share"] = found["utilisation"] / found["bound"]
    found["link_over_compute"] = found["transfer_seconds"] / found["group_seconds"]
    found |= {"megabits": given.megabits, "declared_flops": given.flops, "load": os.getloadavg()[0]}
    print("the device is a double: it computes, and then sleeps to the declared rate")
    for name, value in found.items():
        print(f"{name:>18} {value}")
    if given.out:
        given.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
