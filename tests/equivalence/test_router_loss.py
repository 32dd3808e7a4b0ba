"""The part of a mixture's router in the loss is what TRL's trainers add: the coefficient times transformers' own loss of it.

Run: pytest tests/equivalence/test_router_loss.py
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, MODELS, ROWS, SPLIT, PlainTrainer, batch_of
from safetensors.torch import load_file
from short_run import short_run
from transformers import AutoConfig, AutoModelForCausalLM

import headrace
from headrace.engine.trainer import Engine
from headrace.losses.router import TRAINED, note_router_loss, with_router_loss
from headrace.model import Chain
from headrace.terms.errors import ConfigError
from headrace.terms.options.optimizer import Optimizer

# In the class of the configuration: the file has none.
OWN = 0.001
GRPO = "grpo:num_generations=2"


def _batch(seed: int = 0) -> dict[str, torch.Tensor]:
    batch = batch_of(ROWS, LENGTH, seed, padded=True)
    batch["labels"][:, :8] = -100
    return batch


def _beside(loss: str | None) -> dict[str, torch.Tensor]:
    if loss is None:
        return {}
    beside = {"desirable": torch.arange(ROWS) % 4 < 2, "reference_log_probs": torch.full((ROWS,), -60.0)}
    return beside | {"rewards": torch.arange(ROWS) % 3 / 2.0}


def _router(model: Any, batch: Mapping[str, torch.Tensor], rows: slice = slice(None)) -> torch.Tensor:
    given = {name: batch[name][rows] for name in ("input_ids", "attention_mask")}
    return model(**given, output_router_logits=True, use_cache=False).aux_loss


def _losses(
    path: Path, out: Path, batch: Mapping[str, torch.Tensor], router_rows: int = 0, **given: Any
) -> tuple[float, float]:
    """Return the loss of the first step, and that of an evaluation before."""
    options = {"compute_dtype": "float32", "host_memory": "4GiB", "output": out, **given}
    with Engine.open(path, headrace.Options(**options)) as engine:
        engine.router_rows = router_rows
        return engine.evaluate(batch).loss, engine.step(batch).loss


@pytest.mark.parametrize(
    ("loss", "asked", "coefficient"),
    [
        pytest.param(None, None, 0.0, marks=pytest.mark.wide),
        pytest.param(None, "model", OWN, marks=pytest.mark.wide),
        ("dpo", None, OWN),
        pytest.param("dpo", 0, 0.0, marks=pytest.mark.wide),
        ("kto", 0.5, 0.5),
        pytest.param(None, 0.25, 0.25, marks=pytest.mark.wide),
        pytest.param("kto", None, OWN, marks=pytest.mark.wide),
        pytest.param(GRPO, None, OWN, marks=pytest.mark.wide),
        pytest.param("simpo", None, 0.0, marks=pytest.mark.wide),
        pytest.param("orpo", None, 0.0, marks=pytest.mark.wide),
        pytest.param("orpo", "model", OWN, marks=pytest.mark.wide),
    ],
)
def test_the_router_has_the_part_that_trl_gives_it(
    loss: str | None, asked: Any, coefficient: float, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """That of KTO is of completions alone, not of the others' that say how far the model has moved."""
    path, batch = model_dir("many-experts"), _batch() | _beside(loss)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        part = coefficient * float(_router(model, batch, slice(0, None, 2) if loss == "kto" else slice(None)))
    without = _losses(path, tmp_path / "without", batch, loss=loss, router_aux_loss_coef=0)
    found = _losses(path, tmp_path / "with", batch, loss=loss, router_aux_loss_coef=asked)
    assert [a - b for a, b in zip(found, without, strict=True)] == pytest.approx([part, part], rel=1e-3, abs=1e-7)


def test_it_is_trained_as_plain_pytorch_does_in_batches_of_rows(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Batches of four rows, and of what is left, in micro-batches of two."""
    path, batches = model_dir("many-experts"), [_batch(seed) for seed in range(3)]
    plain, expected = PlainTrainer(path, 1e-3, 0.0, None), []
    for batch in batches:
        plain.optimizer.zero_grad()
        given = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
        routed = torch.stack([_router(plain.model, batch, rows) for rows in (slice(0, 4), slice(4, None))]).mean()
        loss = plain.model(**given, use_cache=False).loss + 0.5 * routed
        loss.backward()
        plain.optimizer.step()
        expected.append(float(loss.detach()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "router_rows", 4)
        options = {"adjust": SPLIT, "weight_decay": 0.0, "compute_dtype": "float32", "router_aux_loss_coef": 0.5}
        losses, weights = short_run(path, tmp_path / "run", batches, **options)
    assert losses == pytest.approx(expected, rel=2e-5)
    plain.model.save_pretrained(tmp_path / "plain")
    state = load_file(tmp_path / "plain" / "model.safetensors")
    assert all(torch.allclose(weight.float(), state[key], rtol=1e-3, atol=5e-5) for key, weight in weights.items())


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("many-experts", {"loss": "dpo"}, [f"{TRAINED} dpo plus 0.001 times the router's; router_aux_loss_coef 0"]),
        ("many-experts", {}, [f"{TRAINED} tokens, without the router's: output_router_logits is off"]),
        ("many-experts", {"router_aux_loss_coef": 0}, [f"{TRAINED} tokens, without the router's"]),
        ("mixtral-aux", {}, [f"{TRAINED} tokens plus 0.001 times the router's"]),
        ("llama", {"router_aux_loss_coef": "model"}, []),
    ],
)
def test_a_note_says_which_loss_is_trained(name: str, given: dict[str, Any], words: list[str]) -> None:
    options = headrace.Options(**given)
    values = dict(MODELS[name])
    config = with_router_loss(AutoConfig.for_model(values.pop("model_type"), **values), options)
    chain = Chain.from_config(config, "float32", Optimizer())
    note_router_loss(chain, options)
    notes = [note for note in chain.notes if note.startswith(TRAINED)]
    assert len(notes) == len(words)
    assert all(note.startswith(each) for note, each in zip(notes, words, strict=True))


def test_a_coefficient_for_a_model_without_a_router_is_refused(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^router_aux_loss_coef: 0\.1 was asked for, but LlamaConfig adds no router's loss"):
        _losses(model_dir("llama"), tmp_path / "run", _batch(), router_aux_loss_coef=0.1)
    assert not (tmp_path / "run").exists()
    _losses(model_dir("llama"), tmp_path / "run", _batch(), router_aux_loss_coef=0)
