"""A run that evaluates, by the real engine: its losses are those of plain transformers and of `headrace eval`, and training
does not change by a bit.

Run: pytest tests/cli/test_evaluated_run.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_worlds import World
from saved_models import own_loss
from tiers import sampled
from transformers import AutoModelForCausalLM

from headrace.cli import main
from headrace.data.batches.open_data import open_stream
from headrace.report.metrics import read_metrics, read_records
from headrace.store.run_directory import RunDirectory

FLOAT = ("--compute-dtype", "float32", "--seed", "3")
WAYS: dict[str, tuple[str, ...]] = {
    "packed": (),
    "one sample a row": ("--no-packing",),
    "adapters": ("--adapter", "lora:rank=2", "--learning-rate", "1e-2"),
    "unclipped": ("--max-grad-norm", "0"),
    "bfloat16": ("--compute-dtype", "bfloat16"),
    "seldom": ("--checkpoint-every", "3"),
    "lsp": ("--gradient", "lsp:dimension=8,check=2"),
    "lomo": ("--optimizer", "lomo"),
    "device tier": ("--device-memory", "64MiB"),
    "plain": ("interpreter=plain",),
}


@pytest.fixture(autouse=True)
def whole_floats(world: World) -> None:
    """Let the model be stored in float32, so that what is exported is what was evaluated."""
    AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32).save_pretrained(world.model)


def ran(world: World, name: str, *words: str, steps: int = 4) -> Path:
    """Run `headrace train` in the world's folder `name` and return that."""
    with pytest.raises(SystemExit) as left:
        main(world.train_words(*FLOAT, "--learning-rate", "1e-3", *words, max_steps=steps, output=world.folder / name))
    assert not left.value.code
    return world.folder / name


def weights(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "final").glob("*.safetensors")}


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [record for record in read_records(run / "metrics.jsonl") if "eval_loss" in record]


@pytest.mark.wide
@pytest.mark.parametrize("way", sampled(list(WAYS), ["packed"]))
def test_training_has_the_same_bits_and_the_loss_is_that_of_eval(
    way: str, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = world.folder / "held-out.jsonl"
    held_out.write_text("".join(json.dumps({"text": f"the turbine turns {i} times" * (i % 3 + 1)}) + "\n" for i in range(9)))
    plain = ran(world, "plain", *WAYS[way])
    evaluated = ran(world, "evaluated", *WAYS[way], "--eval-data", str(held_out), "--eval-steps", "1")
    assert weights(evaluated) == weights(plain)
    losses = [[record["loss"] for record in read_metrics(run / "metrics.jsonl")] for run in (plain, evaluated)]
    assert losses[0] == losses[1]
    found = evaluations(evaluated)
    assert [each["step"] for each in found] == [1, 2, 3, 4]
    assert len({each["eval_loss"] for each in found}) == 4, "each step changed it"
    capsys.readouterr()
    dtype = WAYS[way][-1] if way == "bfloat16" else "float32"
    asked = ["--sequence-length", "32", "--host-memory", "4GiB", "--json", "--compute-dtype", dtype]
    with pytest.raises(SystemExit):
        main(["eval", str(evaluated), "--data", str(held_out), *asked])
    said = json.loads(capsys.readouterr().out)
    assert said["tokens"] == found[-1]["eval_tokens"]
    assert said["loss"] == pytest.approx(found[-1]["eval_loss"], rel=1e-2 if way == "bfloat16" else 1e-5)


def test_the_loss_of_a_split_is_that_of_transformers_on_its_samples(world: World) -> None:
    run = ran(world, "split", "--eval-split", "0.3", "--load-best-model-at-end")
    config = RunDirectory(run).read_config()
    held_out = open_stream(config).held_out
    assert held_out is not None
    samples = [held_out.sample(index) for index in range(len(held_out))]
    expected, tokens = own_loss(run / "final", [(each.input_ids.tolist(), each.trained.tolist()) for each in samples])
    (found,) = evaluations(run)
    assert (len(held_out), tokens) == (6, found["eval_tokens"])
    assert found["eval_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.deep
def test_the_best_model_is_kept_through_steps(world: World) -> None:
    """The last steps have a rate that is far too high, so the best model is an early one; its bits are those of a run that ends
    there.
    """
    more = (
        "--eval-split",
        "5",
        "--eval-steps",
        "1",
        "--load-best-model-at-end",
        "--warmup-steps",
        "4",
        "--learning-rate",
        "1.0",
    )
    run = ran(world, "best", *more)
    found = evaluations(run)
    best = min(found, key=lambda each: each["eval_loss"])["step"]
    assert best < 4
    assert json.loads((run / "final" / "headrace.json").read_text())["steps"] == best
    short = ran(world, "short", *more, steps=best)
    assert weights(run) == weights(short)


@pytest.mark.wide
def test_a_plan_has_the_evaluations(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the steps are given; and it says what has no effect."""
    sizes = ("--sequence-length", "32", "--tokens-per-step", "64", "--eval-split", "0.3", "--eval-steps", "2")
    words = ["plan", str(world.model), "--data", str(world.data), *sizes, "--max-steps", "5", "--json"]
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(words)
    assert not left.value.code
    values = json.loads(capsys.readouterr().out)
    assert (values["evaluations"], values["without_effect"]) == (3, [])
    assert values["evaluation_seconds"] > 0
