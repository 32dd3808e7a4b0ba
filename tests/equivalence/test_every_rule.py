"""Each rule of `--optimizer`, through the engine: the numbers of plain PyTorch, and a resumed run goes on with them.

The references are torch's own where there is one; what a rule computes, bit for bit, is held to its contract in `tests/update`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, ROWS, PlainTrainer, batch_of
from plain_rules import PlainAdaLomo, PlainLion, PlainLomo, PlainMuon
from tiers import sampled
from transformers import AutoModelForCausalLM

import headrace
from headrace.engine.trainer import Engine

RATE, DECAY = 1e-3, 0.1

REFERENCES: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "lomo": lambda groups: PlainLomo(groups, lr=RATE),
    "adalomo": lambda groups: PlainAdaLomo(groups, lr=RATE),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=RATE, foreach=False),
    "lion:beta2=0.95": lambda groups: PlainLion(groups, lr=RATE, betas=(0.9, 0.95)),
    "muon": lambda groups: PlainMuon(groups, lr=RATE),
}
QUICK = ("lomo", "adalomo", "muon")


@pytest.mark.parametrize("optimizer", sampled(REFERENCES, QUICK))
def test_a_rule_is_plain_pytorch_and_resumes(optimizer: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("llama-tied")
    plain = PlainTrainer(path, RATE, DECAY, 0.5)
    groups = [{key: group[key] for key in ("params", "weight_decay")} for group in plain.optimizer.param_groups]
    plain.optimizer = REFERENCES[optimizer](groups)
    expected = [plain.step(batch_of(ROWS, LENGTH, seed))[0] for seed in range(4)]
    given: dict[str, Any] = {"learning_rate": RATE, "weight_decay": DECAY, "compute_dtype": "float32", "max_grad_norm": 0.5}
    lengths = {"tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH, "host_memory": "4GiB"}
    options = headrace.Options(**given, **lengths, optimizer=optimizer, output=tmp_path / "run")
    with Engine.open(path, options) as engine:
        losses = [engine.step(batch_of(ROWS, LENGTH, seed)).loss for seed in range(2)]
    with Engine.resume(tmp_path / "run") as engine:
        losses += [engine.step(batch_of(ROWS, LENGTH, seed)).loss for seed in range(2, 4)]
        engine.save_pretrained(tmp_path / "out")
    assert losses == pytest.approx(expected, rel=1e-5)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for (key, got), want, old in zip(ours.named_parameters(), plain.model.parameters(), before.parameters(), strict=True):
        if optimizer == "muon":  # a gradient's last bits change Newton-Schulz in bfloat16 by 2 to 4 percent
            assert (got - want).norm() < 0.06 * (want - old).norm(), key
        else:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5, msg=lambda text, key=key: f"{key}: {text}")
        assert not torch.equal(got, old), key
