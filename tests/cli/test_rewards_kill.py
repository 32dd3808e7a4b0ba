"""A run whose model writes its own rows is killed or stopped at any moment, and ends with the bytes of an undisturbed one.

Run: pytest tests/cli/test_rewards_kill.py
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import node_processes
import pytest
from tiers import sampled

pytestmark = pytest.mark.process
STEPS, LIMIT_SECONDS = 5, 240.0
KINDS = {"adapters": ["--adapter", "lora:rank=2"], "full": []}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    node_processes.write_model(folder)
    prompts = [{"prompt": f"the {number} th drop of", "goal": number % 3} for number in range(7)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)) + "\n")
    (folder / "own.py").write_text(
        "def judge(prompts, completions, goal, **others):\n"
        "    return [text.count('a') - goal[row] * len(text) / 20 for row, text in enumerate(completions)]\n"
    )
    return folder


def words(place: Path, output: Path, kind: str) -> list[str]:
    loss = "grpo:num_generations=4,max_completion_length=8"
    budget = ["--host-memory", "3GiB", f"cache={place / 'cache'}", "--no-measure"]
    sizes = ["--max-steps", str(STEPS), "--sequence-length", "32", "--tokens-per-step", "256", "--learning-rate", "1e-2"]
    data = [str(place / "model"), str(place / "prompts.jsonl"), "--reward", f"{place / 'own.py'}:judge", "--loss", loss]
    return ["train", *data, *sizes, *budget, *KINDS[kind], "--output", str(output)]


def begin(given: list[str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as out:
        return subprocess.Popen([sys.executable, "-m", "headrace", *given], stdout=out, stderr=out, start_new_session=True)


def generators() -> set[int]:
    found = set[int]()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"rollout_worker" in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def weights(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (output / "final").glob("*.safetensors")}


def steps_done(output: Path) -> int:
    metrics = output / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "number"), sampled([("adapters", signal.SIGKILL), ("full", signal.SIGINT)], [("adapters", signal.SIGKILL)])
)
def test_killed_or_stopped_it_goes_on_to_the_same_bytes(kind: str, number: int, place: Path) -> None:
    whole, killed, log = place / f"{kind}-whole", place / f"{kind}-killed", place / f"{kind}.log"
    run = begin(words(place, whole, kind), log)
    assert run.wait(LIMIT_SECONDS) == 0, log.read_text()
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert all({"reward", "reward_std", "completions/mean_length"} <= record.keys() for record in records)
    assert len({record["reward"] for record in records}) > 1, "completions differ"
    run = begin(words(place, killed, kind), log)
    end = time.monotonic() + LIMIT_SECONDS
    while steps_done(killed) < 2:
        assert run.poll() is None, log.read_text()
        assert time.monotonic() < end
        time.sleep(0.02)
    before = generators()
    os.kill(run.pid, number)
    run.wait(LIMIT_SECONDS)
    assert run.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130), log.read_text()
    while before & generators():  # they go with their parent
        assert time.monotonic() < end
        time.sleep(0.05)
    assert not (killed / "final").exists()
    run = begin(["resume", str(killed)], log)
    assert run.wait(LIMIT_SECONDS) == 0, log.read_text()
    assert weights(killed) == weights(whole)
    assert not [*killed.glob("headrace-rollouts*")], "the weights that were generated from are gone"


def test_a_reward_that_fails_ends_the_run_in_one_line_and_it_can_go_on(place: Path) -> None:
    output, log, file = place / "failing", place / "failing.log", place / "failing.py"
    file.write_text("def judge(completions, **others):\n    return 1 / 0\n")
    given = words(place, output, "adapters")
    given[given.index("--reward") + 1] = f"{file}:judge"
    run = begin(given, log)
    assert run.wait(LIMIT_SECONDS) == 2
    assert "reward: " in log.read_text()
    assert "ZeroDivisionError" in log.read_text()
    assert "Traceback" not in log.read_text()
    file.write_text("def judge(completions, **others):\n    return [len(text) for text in completions]\n")
    run = begin(["resume", str(output)], log)
    assert run.wait(LIMIT_SECONDS) == 0, log.read_text()
    assert weights(output)
