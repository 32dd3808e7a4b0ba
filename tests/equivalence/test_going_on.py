"""Training that goes on from an adapter: the bits of one run that was never broken off, and settings that its files decide."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, ROWS, batch_of
from short_run import short_run

import headrace
from headrace.engine.trainer import Engine
from headrace.terms.errors import ConfigError, InputError

SGD = {"optimizer": "sgd:momentum=0", "learning_rate": 0.3, "weight_decay": 0.0}  # nothing but weights to go on from
BATCHES = [batch_of(ROWS, LENGTH, seed) for seed in range(4)]
SETTINGS = "rank=4,alpha=6,target_modules=q_proj+down_proj"


def _begun(path: Path, folder: Path, kind: str) -> Path:
    """Return an adapter that was trained for two steps."""
    short_run(path, folder / "first", BATCHES[:2], adapter=f"{kind}:{SETTINGS}", export=folder / "adapter", **SGD)
    return folder / "adapter"


@pytest.mark.parametrize("kind", ["lora", pytest.param("dora", marks=pytest.mark.deep)])
def test_two_runs_one_after_the_other_have_the_bits_of_one(kind: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("llama", "bfloat16")
    losses, expected = short_run(path, tmp_path / "whole", BATCHES, adapter=f"{kind}:{SETTINGS}", **SGD)
    begun = _begun(path, tmp_path, kind)
    later, found = short_run(path, tmp_path / "second", BATCHES[2:], adapter=f"{kind}:from={begun}", **SGD)
    assert later == losses[2:]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], want) for key, want in expected.items())
    first, second = (json.loads((folder / "adapter_config.json").read_text()) for folder in (begun, tmp_path / "second-out"))
    assert first == second


@pytest.mark.wide
def test_a_run_that_has_begun_needs_the_adapter_no_more(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("llama", "bfloat16")
    begun = _begun(path, tmp_path, "lora")
    options: dict[str, Any] = {"adapter": f"lora:from={begun}", "host_memory": "4GiB", **SGD}
    with Engine.open(path, headrace.Options(output=tmp_path / "run", **options)) as engine:
        engine.step(BATCHES[2])
    shutil.rmtree(begun)
    with Engine.resume(tmp_path / "run") as engine:
        assert engine.step_index == 1
        engine.step(BATCHES[3])


@pytest.mark.wide
def test_the_reference_is_the_adapter_with_which_training_begins(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """The reference's numbers before the first step are those of the finished first run."""
    path = model_dir("llama", "bfloat16")
    batch = batch_of(ROWS, LENGTH, 0)
    options: dict[str, Any] = {"host_memory": "4GiB", "loss": "dpo", **SGD}
    reference = {"reference_log_probs": torch.zeros(ROWS)}
    with Engine.open(path, headrace.Options(output=tmp_path / "a", adapter=f"lora:{SETTINGS}", **options)) as engine:
        before = engine.log_probs(batch)
        engine.step(batch | reference)
        after = engine.log_probs(batch)
        engine.save_pretrained(tmp_path / "adapter")
    assert not torch.equal(before, after)
    with Engine.open(
        path, headrace.Options(output=tmp_path / "b", adapter=f"lora:from={tmp_path / 'adapter'}", **options)
    ) as engine:
        assert torch.equal(engine.log_probs(batch), after)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lora:rank=8,from={}", "rank 8 is asked for, and .* has 4"),
        ("dora:from={}", "is lora, and dora is asked for"),
        ("lora:target_modules=q_proj,from={}", "down_proj is not trained, and in .* it is of rank 4"),
        ("lora:from={}/nowhere", "from: .*nowhere"),
    ],
)
def test_an_adapter_that_does_not_suit_is_refused_before_anything_is_written(
    text: str, words: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path = model_dir("llama", "bfloat16")
    begun = _begun(path, tmp_path, "lora")
    with pytest.raises(ConfigError, match=words):
        Engine.open(path, headrace.Options(output=tmp_path / "run", adapter=text.format(begun)))
    assert not (tmp_path / "run").exists()


def test_an_adapter_of_another_model_is_refused(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    begun = _begun(model_dir("llama", "bfloat16"), tmp_path, "lora")
    with pytest.raises(InputError, match="down_proj"):
        Engine.open(
            model_dir("gpt2-dropout", "bfloat16"), headrace.Options(output=tmp_path / "run", adapter=f"lora:from={begun}")
        )
    assert not (tmp_path / "run").exists()
