"""The text model of a model of several parts is trained as it would be alone: the same losses, the same weights, bit for bit.

Run: pytest tests/equivalence/test_text_models.py
"""

from pathlib import Path

import pytest
import torch
from plain import PlainTrainer, batch_of, check_close
from short_run import short_run
from tiers import sampled
from tiny_wholes import make_whole
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from headrace.model import Checkpoint

BATCHES = [batch_of(4, 32, seed, vocabulary=160) for seed in range(3)]


def saved(tmp_path: Path, name: str) -> tuple[Path, Path]:
    """Save a whole model, and its text model alone; return their directories."""
    whole = make_whole(name)
    whole.save_pretrained(tmp_path / "whole")
    text = AutoModelForCausalLM.from_config(Checkpoint.open(tmp_path / "whole").config, dtype=torch.float32)
    text.get_decoder().load_state_dict(whole.get_decoder().state_dict())
    text.get_output_embeddings().load_state_dict(whole.get_output_embeddings().state_dict())
    text.save_pretrained(tmp_path / "text")
    return tmp_path / "whole", tmp_path / "text"


@pytest.mark.wide
@pytest.mark.parametrize("name", sampled(["gemma3", "llava-experts", "qwen3_5"], ["llava-experts"]))
def test_inside_and_alone_are_the_same(tmp_path: Path, name: str) -> None:
    ends = []
    for directory in saved(tmp_path, name):
        run = tmp_path / f"{directory.name}-run"
        losses, _ = short_run(directory, run, BATCHES)
        ends.append((losses, tmp_path / f"{directory.name}-run-out"))
    assert ends[0][0] == ends[1][0]
    whole = AutoModelForImageTextToText.from_pretrained(ends[0][1])
    text = AutoModelForCausalLM.from_pretrained(ends[1][1])
    assert torch.equal(whole.get_output_embeddings().weight, text.get_output_embeddings().weight)
    inside, alone = whole.get_decoder().state_dict(), text.get_decoder().state_dict()
    assert set(inside) == set(alone)
    for key, value in inside.items():
        assert torch.equal(value, alone[key]), key


@pytest.mark.parametrize("name", sampled(["gemma3", "mistral3-tied"], ["gemma3"]))
def test_the_whole_model_is_that_of_plain_pytorch(tmp_path: Path, name: str) -> None:
    directory, _ = saved(tmp_path, name)
    plain = PlainTrainer(directory, 1e-3, 0.1, None, AutoModelForImageTextToText)  # as in a short run
    no_pictures = {"token_type_ids": torch.zeros_like(BATCHES[0]["input_ids"])} if name == "gemma3" else {}
    expected = [plain.step({**batch, **no_pictures})[0] for batch in BATCHES]
    losses, _ = short_run(directory, tmp_path / "run", BATCHES, compute_dtype="float32", export=tmp_path / "out")
    assert losses == pytest.approx(expected, rel=2e-6)
    ours = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for (key, got), want in zip(ours.named_parameters(), plain.model.parameters(), strict=True):
        check_close(got, want, key)
