"""A trained embedding whose rows are read and updated one by one has the bits of one that is updated whole."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, ROWS, SPLIT, batch_of, train
from tiers import sampled
from transformers import AutoModelForCausalLM

import headrace
from headrace.engine.trainer import Engine
from headrace.model.learned_rows import LearnedRows
from headrace.terms.errors import ConfigError, RunDirectoryError

STEPS = 4
EMBEDDING = "model.embed_tokens.weight"
CASES: dict[str, dict[str, Any]] = {
    "clipped": {"max_grad_norm": 0.1},
    "unclipped": {"max_grad_norm": None},
    "bfloat16": {"compute_dtype": "bfloat16"},
    "float16, a schedule": {"compute_dtype": "float16", "lr_schedule": "cosine", "max_steps": 9},
    "a device": {"device_memory": "1GiB", "compute_dtype": "bfloat16"},
    "a device, plain": {"device_memory": "1GiB", "interpreter": "plain"},
    "plain": {"interpreter": "plain", "max_grad_norm": 0.1},
    "seldom commits": {"checkpoint_every": 3},
    "sgd": {"optimizer": "sgd:momentum=0.9", "max_grad_norm": 0.1},
    "bfloat16 sums": {"compute_dtype": "float32", "gradient_dtype": "bfloat16"},
}


def trained(path: Path, run: Path, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    more = {"learning_rate": 1e-2, "weight_decay": 0.1, "compute_dtype": "float32", "adjust": SPLIT, **options}
    return train(path, run, steps=STEPS, **more)


@pytest.mark.parametrize("case", sampled(CASES, ("clipped", "bfloat16")))
@pytest.mark.parametrize("name", sampled(("llama", "mixtral-aux", "deepseek"), ("llama",)))
def test_rows_have_the_bits_of_dense_updates(
    name: str, case: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path = model_dir(name, "bfloat16" if CASES[case].get("compute_dtype") == "bfloat16" else "float32")
    kinds: list[type] = []

    def look(engine: Engine) -> None:
        kinds.append(type(engine.chain.model.get_input_embeddings()))

    expected, wanted = trained(path, tmp_path / "dense", **CASES[case])
    losses, found = trained(path, tmp_path / "rows", gradient="rows", inspect=look, **CASES[case])
    assert kinds == [LearnedRows]
    assert losses == expected
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    first = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).get_input_embeddings().weight.detach()
    ids = torch.cat([batch_of(ROWS, LENGTH, seed)["input_ids"].flatten() for seed in range(STEPS)]).unique()
    other = torch.ones(len(first), dtype=torch.bool)
    other[ids] = False
    assert other.any(), "some rows were never read"
    moved = (found[EMBEDDING].float() != first).any(dim=1)
    assert moved[ids].all()
    assert moved[other].all() or CASES[case].get("compute_dtype") == "bfloat16", "and decayed"
