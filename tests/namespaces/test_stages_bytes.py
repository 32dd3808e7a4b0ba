"""Stages on machines of their own: a cut carries 4 T h bytes a step, half of it in 8 bits, as the kernel counts them."""

from pathlib import Path

import pytest
from network import Network
from node_processes import write_model, write_texts

HIDDEN, ROWS, LENGTH = 512, 64, 128
CUT_BYTES = 4 * ROWS * LENGTH * HIDDEN  # 16 MiB
# Headers of packets, acknowledgements, heartbeats: as many whatever the type of a cut.
SLACK_BYTES = CUT_BYTES / 50
# Who waits for stage 0 to begin asks for it again and again; many steps make that small on a slow machine, too.
MORE_STEPS = 5


def bytes_of_a_run(folder: Path, runs: Path, steps: int, stage_dtype: str | None) -> int:
    """Return what stage 0 sends and receives in a run of so many steps, on the model and data of a folder."""
    output = runs / f"run-{steps}-{stage_dtype}"
    with Network(2) as network:
        stages = ["--stages", ",".join(f"{network.address(number)}:29500" for number in range(2))]
        common = [*stages, "--secret", str(folder / "secret")]
        options = {
            "max_steps": steps,
            "sequence_length": LENGTH,
            "tokens_per_step": ROWS * LENGTH,
            "host_memory": "3GiB",
            "cache": folder / "cache",
            "output": output,
            "measure": "false",
            **({"stage_dtype": stage_dtype} if stage_dtype else {}),
        }
        words = [str(folder / "model"), str(folder / "data.jsonl"), *(f"{key}={value}" for key, value in options.items())]
        first = network.start(0, "-m", "headrace", "train", *words, *common)
        second = network.start(1, "-m", "headrace", "train", "--ssd", f"{output}-ssd", "--host-memory", "3GiB", *common)
        found = [process.communicate(timeout=1200)[0] for process in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0), "\n".join(found)
        return sum(network.moved(0))


@pytest.mark.net
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("stage_dtype", [None, "int8"])
def test_a_cut_carries_what_the_formula_says(stage_dtype: str | None, tmp_path: Path) -> None:
    write_model(tmp_path, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=2)
    write_texts(tmp_path, samples=1000)
    (tmp_path / "secret").write_text("of this test")
    wanted = CUT_BYTES * (0.5 + 2 / HIDDEN if stage_dtype else 1)  # 8 bits, and a scale of 4 bytes for each token
    for attempt in range(3):  # the least counts: what a busy machine makes TCP send again is no byte of ours
        folder = tmp_path / str(attempt)
        longer, shorter = (bytes_of_a_run(tmp_path, folder, steps, stage_dtype) for steps in (1 + MORE_STEPS, 1))
        found = (longer - shorter) / MORE_STEPS
        assert wanted <= found
        if found <= wanted + SLACK_BYTES:
            return
    raise AssertionError((found, wanted))
