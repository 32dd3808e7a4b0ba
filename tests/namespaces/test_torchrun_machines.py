"""torchrun on two machines: ranks meet at an endpoint, the first has model and data, and the bits are those of one machine."""

import subprocess
import sys
from pathlib import Path

import pytest
from network import Network
from node_processes import write_model

STEPS, LIMIT_SECONDS = 4, 300.0
MEETINGS = {
    # With c10d machines agree on their numbers by themselves. These two have one name, so is_host says whose the endpoint is.
    "c10d": lambda number, first: [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={first}:29400",
        "--rdzv-id=of-this-test",
        f"--rdzv-conf=is_host={number == 0}",
    ],
    "static": lambda number, first: [f"--node-rank={number}", f"--master-addr={first}", "--master-port=29400"],
}


def words_of(folder: Path, output: Path) -> list[str]:
    """Return the command line of a run, without the program."""
    options = {
        "max_steps": STEPS,
        "sequence_length": 32,
        "tokens_per_step": 256,
        "gradient_sum": "tree",
        "host_memory": "2GiB",
        "cache": folder / "cache",
        "output": output,
        "measure": "false",
    }
    words = [f"{key}={value}" for key, value in options.items()]
    return ["-m", "headrace", "train", str(folder / "model"), str(folder / "data.jsonl"), *words]


def final_weights(output: Path) -> bytes:
    return (output / "final" / "model.safetensors").read_bytes()


@pytest.mark.net
@pytest.mark.timeout(900)
@pytest.mark.parametrize("meeting", MEETINGS)
def test_ranks_of_two_machines_end_with_the_bytes_of_one(meeting: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    write_model(first)

    def torchrun(network: Network, number: int, folder: Path) -> "subprocess.Popen[str]":
        size = ["--nnodes=2", "--nproc-per-node=2", f"--local-addr={network.address(number)}"]
        where = MEETINGS[meeting](number, network.address(0))
        words = words_of(folder, folder / "two-machines")
        return network.start(number, "-m", "torch.distributed.run", *size, *where, *words)

    with Network(2) as network:
        # The second machine has neither the model nor the data: its words name folders that are not there.
        processes = [torchrun(network, number, folder) for number, folder in enumerate((first, second))]
        said = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
        assert min(network.moved(0)) > 1 << 20, "gradients crossed the cable"
    standalone = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", *words_of(first, first / "one-machine")]
    done = subprocess.run([sys.executable, *standalone], capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    assert final_weights(first / "two-machines") == final_weights(first / "one-machine")
    assert not [*second.rglob("headrace-*")], "what the ranks of the second machine held goes with the state"
