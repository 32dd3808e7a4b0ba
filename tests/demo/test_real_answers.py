"""The demo's model answers as transformers does: as it came, from a run's `final/`, and from a run that was killed.

It is left out, by name, where pip cannot bring the model.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from real_model import NAME, NoRealModel, real_model
from stage import environment
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.process import cache_directory

pytestmark = [pytest.mark.deep, pytest.mark.process, pytest.mark.timeout(3600)]
QUESTION, NEW_TOKENS = "What does textwrap.dedent do in Python?", 16
OPTIONS = ("--compute-dtype", "float32", "--host-memory", "6GiB")
STEPS = ("--max-steps", "3", "--learning-rate", "1e-4", "--tokens-per-step", "64", "--sequence-length", "64", "--no-measure")


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return real_model(cache_directory(), lambda _: None)
    except NoRealModel as error:
        pytest.skip(f"{NAME}: {error}")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    asked = {"role": "user", "content": QUESTION}
    told = [{"role": "assistant", "content": f"It removes {what}."} for what in ("spaces", "what is common", "margins")]
    path.write_text("".join(json.dumps({"messages": [asked, each]}) + "\n" for each in told), encoding="utf-8")
    return path


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "headrace", *map(str, words)]


def answer(place: Path) -> str:
    words = ("--prompt", QUESTION, "--temperature", 0, "--max-new-tokens", NEW_TOKENS, *OPTIONS)
    done = subprocess.run(command("generate", place, *words), capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.removesuffix("\n")


def own_answer(directory: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    text = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    made = stock.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


def test_as_it_came(model: Path) -> None:
    assert answer(model) == own_answer(model)


def test_a_finished_run(model: Path, data: Path, tmp_path: Path) -> None:
    words = ("--output", tmp_path / "run", *OPTIONS, *STEPS)
    subprocess.run(command("train", model, data, *words), env=environment(), check=True, capture_output=True)
    assert answer(tmp_path / "run") == own_answer(tmp_path / "run" / "final")


def test_a_killed_run(model: Path, data: Path, tmp_path: Path) -> None:
    """Of a model in float32: an export has its files' dtype, and in bfloat16 would lose most of the few steps."""
    wide, run = tmp_path / "model", tmp_path / "run"
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).save_pretrained(wide)
    AutoTokenizer.from_pretrained(model).save_pretrained(wide)
    words = command("train", wide, data, "--output", run, *OPTIONS, *STEPS[2:], "--max-steps", "10000")
    with subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text().count("\n") > 1, process)
        process.send_signal(signal.SIGKILL)
    told = answer(run)
    subprocess.run(command("export", run, tmp_path / "out"), env=environment(), check=True, capture_output=True)
    assert told == own_answer(tmp_path / "out")


def wait_for(there: Callable[[], bool], process: "subprocess.Popen[bytes]", seconds: float = 1200.0) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert process.poll() is None, "the run ended"
        assert time.monotonic() < end, "no step in time"
        time.sleep(0.2)
