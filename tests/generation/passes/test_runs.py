"""A run answers: finished, from its final model; interrupted, from its last commit, which is only read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.engine.seams import Seams
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.opened import GenerationModel
from headrace.generate.passes.whose_weights import open_whose_model
from headrace.terms.errors import ConfigError, RunDirectoryError
from headrace.terms.options.budget import Budget
from headrace.testing import RowWire

PROMPT = [[5, 9, 33, 7, 80]]
SETTINGS = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}


LSP = "lsp:dimension=8,nonzeros=2,check=2,alpha=0"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("gradient", "device"), [("dense", None), (LSP, None), pytest.param(LSP, "64MiB", marks=pytest.mark.deep)]
)
def test_a_run_answers_as_its_export_does(
    gradient: str, device: str | None, directory_of: Callable[..., Path], stock: Callable[..., Any], tmp_path: Path
) -> None:
    """Of subspaces, the weights are made of what lies frozen, of what is trained beside it, and of its projectors."""
    run = tmp_path / "run"
    options = headrace.Options(
        output=run, compute_dtype="float32", host_memory="4GiB", learning_rate=0.05, gradient=gradient, tokens_per_step=32
    )
    ids = torch.randint(3, 160, (2, 16), generator=torch.Generator().manual_seed(0))
    budget = Budget(host="4GiB", device=device)
    with headrace.Engine.open(directory_of("llama-tied"), options) as engine:
        for _ in range(3):
            engine.step({"input_ids": ids, "labels": ids})
        engine.flush()
        with pytest.raises(RunDirectoryError):  # in progress
            Generator.open(run, budget, opened=GenerationModel.of_store)
        engine.save_pretrained(tmp_path / "out")
    (run / "config.yaml").write_text("", encoding="utf-8")  # by which a run is known
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    expected = stock(tmp_path / "out", "float32", PROMPT, 0, SETTINGS)[0, len(PROMPT[0]) :].tolist()
    with Generator.open(run, budget, opened=open_whose_model) as generator:
        ((_, tokens),) = generator.generate(PROMPT, **SETTINGS)
        assert any("after step 3" in note for note in generator.model.notes)
    assert list(tokens) == expected
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    with pytest.raises(ConfigError, match="compute_dtype"):
        Generator.open(run, budget, compute_dtype="bfloat16", opened=open_whose_model)
    (tmp_path / "out").rename(run / "final")  # as the end of a run writes it
    with Generator.open(run, budget, opened=open_whose_model) as generator:
        ((_, tokens),) = generator.generate(PROMPT, **SETTINGS)
        assert not any("unfinished" in note for note in generator.model.notes)
    assert list(tokens) == expected


def test_a_run_with_seams_of_its_own_is_refused(directory_of: Callable[..., Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = headrace.Options(output=run, compute_dtype="float32", host_memory="4GiB")
    ids = torch.full((1, 8), 5)
    with headrace.Engine.open(directory_of("llama-tied"), options, seams=Seams(RowWire())) as engine:
        engine.step({"input_ids": ids, "labels": ids})
    with pytest.raises(RunDirectoryError, match="no option names"):
        Generator.open(run, Budget(host="4GiB"), opened=GenerationModel.of_store)
