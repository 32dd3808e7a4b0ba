"""Losses, rewards and gradients are those of TRL's trainers, whose numbers `make test-trl` wrote."""

import json
from typing import Any

import pytest
import torch
from trl_numbers import CASES, STORED, tiny

from headrace.losses import loss_of

NUMBERS: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8"))


def _batch(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return rows padded on the right, with masks of tokens and of completions."""
    longest = max(len(row["input_ids"]) for row in rows)
    names = {"input_ids": "input_ids", "completion": "trained"}
    found = {name: torch.tensor([row[key] + [0] * (longest - len(row[key])) for row in rows]) for name, key in names.items()}
    return found | {
        "attention_mask": torch.tensor([[1] * len(r["input_ids"]) + [0] * (longest - len(r["input_ids"])) for r in rows])
    }


def _log_probs(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-probability of each token by the definition; 0 in column 0 and for padding."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    found = logits.log_softmax(-1)[:, :-1].gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    return torch.cat([torch.zeros_like(found[:, :1]), found], dim=1) * batch["attention_mask"]


@pytest.mark.parametrize("text", CASES)
def test_loss_rewards_and_gradients_are_those_of_trl(text: str) -> None:
    expected, loss = NUMBERS[text], loss_of(text)
    assert loss is not None
    batch = _batch(expected["rows"])
    mask, scored, model = batch["completion"].bool(), batch["attention_mask"].bool(), tiny(0)
    scored[:, 0] = False
    with torch.no_grad():
        reference = (_log_probs(tiny(1), batch) * mask).sum(1)
    beside = {**batch, "reference_log_probs": reference, "scored_mask": scored}
    beside |= {"desirable": torch.tensor(expected["desirable"]).bool()} if "desirable" in expected else {}
    beside |= {"rewards": torch.tensor(expected["rewards"])} if "rewards" in expected else {}
    found = loss(_log_probs(model, batch), mask, beside)
    found.loss.backward()
    assert float(found.loss.detach()) == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
    told = {name: float(value) for name, value in found.metrics.items()}
    if not text.startswith(("simpo", "orpo")):
        assert told == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-5)
    for name in (each for each in expected["metrics"] if each.startswith("rewards/")):
        assert told[name] == pytest.approx(expected["metrics"][name], rel=1e-4, abs=1e-5), name
    norms = {name: float(each.grad.norm()) for name, each in model.named_parameters() if each.grad is not None}
    assert norms == pytest.approx(expected["gradient_norms"], rel=1e-4)


def test_smoothed_labels_are_a_mixture_of_both_choices() -> None:
    batch = _batch(NUMBERS["dpo"]["rows"])
    log_probs, mask = _log_probs(tiny(0), batch).detach(), batch["completion"].bool()
    swapped = torch.arange(len(mask)).view(-1, 2).flip(1).flatten()

    def found(text: str, rows: torch.Tensor) -> float:
        loss = loss_of(text)
        assert loss is not None
        return float(loss(log_probs[rows], mask[rows], {"reference_log_probs": torch.zeros(len(mask))}).loss)

    usual, reverse = found("dpo", torch.arange(len(mask))), found("dpo", swapped)
    assert found("dpo:label_smoothing=0.2", torch.arange(len(mask))) == pytest.approx(0.8 * usual + 0.2 * reverse, rel=1e-5)
