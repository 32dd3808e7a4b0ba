"""A run answers: finished, from its final model; interrupted, from its last commit, which is only read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.engine.generation_model import GenerationModel
from headrace.engine.generator import Generator
from headrace.terms.budget import Budget
from headrace.terms.errors import ConfigError, RunDirectoryError

PROMPT = [[5, 9, 33, 7, 80]]
SETTINGS = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}


def test_an_unfinished_run_answers_as_its_export_does(
    directory_of: Callable[..., Path], stock: Callable[..., Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = headrace.Options(output=run, compute_dtype="float32", host_memory="4GiB", learning_rate=0.05)
    ids = torch.randint(3, 160, (2, 16), generator=torch.Generator().manual_seed(0))
    with headrace.Engine.open(directory_of("llama-tied"), options) as engine:
        engine.step({"input_ids": ids, "labels": ids})
        engine.flush()
        with pytest.raises(RunDirectoryError):  # in progress
            Generator.open(run, Budget(host="4GiB"), opened=GenerationModel.of_store)
        engine.save_pretrained(tmp_path / "out")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with Generator.open(run, Budget(host="4GiB"), opened=GenerationModel.of_store) as generator:
        ((_, tokens),) = generator.generate(PROMPT, **SETTINGS)
        assert any("after step 1" in note for note in generator.model.notes)
    expected = stock(tmp_path / "out", "float32", PROMPT, 0, SETTINGS)
    assert list(tokens) == expected[0, len(PROMPT[0]) :].tolist()
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    with pytest.raises(ConfigError, match="compute_dtype"):
        Generator.open(run, Budget(host="4GiB"), compute_dtype="bfloat16", opened=GenerationModel.of_store)
