"""A loss of the whole step trains as plain PyTorch does with the same loss, whatever the micro-batches and placements."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import FAR_PLACEMENTS, LENGTH, ROWS, SPLIT, PlainTrainer, batch_of
from short_run import short_run
from tiers import sampled

import headrace
from headrace.engine.trainer import Engine
from headrace.terms.errors import DataError


def _pairs(seed: int, reference: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    batch = batch_of(ROWS, LENGTH, seed, padded=True)
    batch["labels"][:, :8] = -100  # prompts
    batch["desirable"] = torch.arange(ROWS) % 4 < 2
    return batch if reference is None else batch | {"reference_log_probs": reference}


def _token_log_probs(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-probability of each token, by the definition."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
    found = logits.log_softmax(-1)[:, :-1].gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    return torch.cat([torch.zeros_like(found[:, :1]), found], dim=1)


def _plain_loss(text: str, log_probs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    mask = (batch["labels"] != -100) & (torch.arange(LENGTH) > 0)
    sums, counts = (log_probs * mask).sum(1), mask.sum(1)
    chosen, rejected = slice(0, None, 2), slice(1, None, 2)
    if text.startswith("dpo"):
        gains = sums - batch["reference_log_probs"]
        return -torch.nn.functional.logsigmoid(0.3 * (gains[chosen] - gains[rejected])).mean()
    if text == "kto":
        gains = sums - batch["reference_log_probs"]
        over = gains[chosen] - gains[rejected].mean().clamp(min=0).detach()
        return (1 - torch.sigmoid(0.1 * torch.where(batch["desirable"][chosen], over, -over))).mean()
    means = sums / counts
    if text == "simpo":
        return -torch.nn.functional.logsigmoid(2.0 * (means[chosen] - means[rejected]) - 0.5).mean()
    odds = torch.log(means.exp() / (1 - means.exp()))
    every = batch["attention_mask"].bool() & (torch.arange(LENGTH) > 0)
    return (
        -0.1 * torch.nn.functional.logsigmoid(odds[chosen] - odds[rejected]).mean()
        - (log_probs * every)[chosen].sum() / every[chosen].sum()
    )


@pytest.mark.parametrize("text", sampled(["dpo:beta=0.3", "simpo", "orpo", "kto"], ["dpo:beta=0.3"]))
def test_training_with_a_loss_of_pairs_is_plain_pytorch(text: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("llama")
    plain = PlainTrainer(path, 1e-3, 0.0, None)
    with torch.no_grad():
        references = [(_token_log_probs(plain.model, b) * (b["labels"] != -100)).sum(1) for b in map(_pairs, range(3))]
    batches = [_pairs(seed, reference) for seed, reference in enumerate(references)]
    expected = []
    for batch in batches:
        plain.optimizer.zero_grad()
        loss = _plain_loss(text, _token_log_probs(plain.model, batch), batch)
        loss.backward()
        plain.optimizer.step()
        expected.append(float(loss.detach()))
    losses, weights = short_run(
        path, tmp_path / "run", batches, adjust=SPLIT, loss=text, weight_decay=0.0, compute_dtype="float32"
    )
    assert losses == pytest.approx(expected, rel=2e-5)
    state = plain.model.state_dict()
    assert all(torch.allclose(weight.float(), state[key], rtol=1e-3, atol=5e-5) for key, weight in weights.items())


@pytest.mark.wide
@pytest.mark.parametrize("name", ["llama-tied", pytest.param("llama", marks=pytest.mark.deep)])
def test_splits_and_placements_change_no_bit_of_a_loss_of_pairs(
    name: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path, batches = model_dir(name, "bfloat16"), [_pairs(seed, torch.full((ROWS,), -40.0)) for seed in range(2)]
    losses, weights = short_run(path, tmp_path / "run", batches, adjust=SPLIT, loss="dpo")
    for number, options in enumerate(FAR_PLACEMENTS.values()):
        placed = options | {"adjust": {**SPLIT, **options["adjust"]}}
        got = short_run(path, tmp_path / f"run{number}", batches, loss="dpo", **placed)
        assert got[0] == losses
        assert all(torch.equal(got[1][key], want) for key, want in weights.items())


@pytest.mark.deep
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "sgd", "learning_rate": 1e-1},
        {"optimizer": "adafactor"},
        {"optimizer": "lion"},
        {"optimizer": "lomo"},
        {"optimizer": "muon"},
        {"optimizer": "adalomo"},
        {"optimizer": "adamw:moments=int8"},
        {"adapter": "dora:rank=4"},
        {"gradient": "lsp:dimension=16,nonzeros=2"},
        {"compute_dtype": "float16"},
        {"compile_blocks": True},
        {"gradient_sum": "tree"},
        {"train": "matrices"},
        {"max_grad_norm": 0.5},
    ],
    ids=str,
)
def test_a_loss_of_pairs_goes_with_other_choices(
    options: dict[str, Any], model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """Far placements have the same bits, and the loss falls on the pairs that are trained."""
    batches = [_pairs(0, torch.full((ROWS,), -40.0))] * 3
    more = {"loss": "dpo", "learning_rate": 1e-3, **options}
    losses, weights = short_run(model_dir("llama", "bfloat16"), tmp_path / "run", batches, adjust=SPLIT, **more)
    assert losses[-1] < losses[0]
    placed = next(iter(FAR_PLACEMENTS.values()))
    placed = placed | {"adjust": {**SPLIT, **placed["adjust"], "chunk_elements": 32768}}  # rules by matrices take whole ones
    again, others = short_run(model_dir("llama", "bfloat16"), tmp_path / "again", batches, **placed, **more)
    assert again == losses
    assert all(torch.equal(others[key], want) for key, want in weights.items())


@pytest.mark.wide
def test_the_reference_is_what_the_model_says_before_training(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path, batch = model_dir("llama"), _pairs(0)
    options = headrace.Options(
        output=tmp_path / "run",
        loss="dpo",
        adapter="lora:rank=4",
        compute_dtype="float32",
        host_memory="4GiB",
        learning_rate=1e-2,
    )
    plain = PlainTrainer(path, 1e-3, 0.0, None)
    with torch.no_grad():
        expected = (_token_log_probs(plain.model, batch) * (batch["labels"] != -100)).sum(1)
    with Engine.open(path, options) as engine:
        reference = engine.log_probs(batch)
        torch.testing.assert_close(reference, expected, rtol=1e-5, atol=1e-4)
        first = engine.step(batch | {"reference_log_probs": reference})
        again = engine.evaluate(batch | {"reference_log_probs": reference})
    assert first.loss == pytest.approx(math.log(2), abs=1e-6)  # nothing is learned yet
    assert {name: first.metrics[f"rewards/{name}"] for name in ("chosen", "rejected", "margins", "accuracies")} == {
        "chosen": 0.0,
        "rejected": 0.0,
        "margins": 0.0,
        "accuracies": 0.0,
    }, "the same sums, bit for bit"
    assert again.loss < first.loss


def test_rows_that_are_no_pairs_are_refused_before_anything_runs(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    with Engine.open(model_dir("llama"), headrace.Options(output=tmp_path / "run", loss="dpo")) as engine:
        with pytest.raises(DataError, match="3 rows, and dpo takes pairs"):
            engine.step(batch_of(3, LENGTH, 0))
        with pytest.raises(DataError, match="dpo needs reference_log_probs"):
            engine.step(batch_of(4, LENGTH, 0))
    with Engine.open(model_dir("llama"), headrace.Options(output=tmp_path / "other", loss="kto")) as engine:
        with pytest.raises(DataError, match="kto needs desirable"):
            engine.step(batch_of(4, LENGTH, 0) | {"reference_log_probs": torch.zeros(4)})
        assert engine.step_index == 0
