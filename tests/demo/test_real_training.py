"""Fifty steps on the demo's model, beside plain PyTorch. It is left out, by name, where pip cannot bring the model."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import python_docs
import torch
from plain import PlainTrainer
from real_model import NAME, NoRealModel, real_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import headrace
from headrace.engine.trainer import Engine
from headrace.machine.cpu import CpuMachine
from headrace.model.kernels.products import WideProducts
from headrace.process import cache_directory

pytestmark = [pytest.mark.deep, pytest.mark.timeout(3600)]
STEPS, ROWS, LENGTH = 50, 2, 32
LEARNING_RATE, CLIP = 1e-5, 1.0
Batch = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return real_model(cache_directory(), lambda _: None)
    except NoRealModel as error:
        pytest.skip(f"{NAME}: {error}")


@pytest.fixture(scope="module")
def batches(model: Path) -> list[Batch]:
    """The library's docstrings one after the other, cut into rows."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.eos_token.join(sample.answer for sample in python_docs.python_docs()[0])
    ids = tokenizer(text, return_tensors="pt").input_ids[0, : STEPS * ROWS * LENGTH].view(STEPS, ROWS, LENGTH)
    return [{"input_ids": rows, "labels": rows} for rows in ids]


@pytest.fixture(scope="module")
def in_float32(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in float32, so that an export is not rounded."""
    directory = tmp_path_factory.mktemp("float32")
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def plain(in_float32: Path, batches: list[Batch]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of stock transformers with torch.optim.AdamW."""
    trainer = PlainTrainer(in_float32, LEARNING_RATE, 0.0, CLIP)
    losses = [trainer.step(batch)[0] for batch in batches]
    return losses, {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}


class NarrowTrainer(PlainTrainer):
    """The same with weights and computation in bfloat16, and masters in float32 that the optimizer moves.

    Beside it a float32 run is another training: a weight of bfloat16 stays where it is until its master is half a unit away.
    """

    def __init__(self, path: Path, lr: float, weight_decay: float, max_grad_norm: float | None, attention: str) -> None:
        super().__init__(path, lr, weight_decay, max_grad_norm)
        self.masters = list(self.model.parameters())
        self.narrow = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation=attention).train()

    def step(self, batch: Batch) -> tuple[float, float]:
        self.narrow.zero_grad()
        # Where the processor has no products of bfloat16 they take three times as long in torch itself.
        with nullcontext() if CpuMachine().multiplies("bfloat16") else WideProducts():
            loss = self.narrow(**batch).loss
            loss.backward()
        for master, weight in zip(self.masters, self.narrow.parameters(), strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm or float("inf"))
        self.optimizer.step()
        with torch.no_grad():
            for master, weight in zip(self.masters, self.narrow.parameters(), strict=True):
                weight.copy_(master)
        return loss.item(), norm.item()


def narrow_losses(model: Path, batches: list[Batch], attention: str) -> list[float]:
    """Return the losses of plain PyTorch in bfloat16 with an attention of transformers' own."""
    trainer = NarrowTrainer(model, LEARNING_RATE, 0.0, CLIP, attention)
    return [trainer.step(batch)[0] for batch in batches]


def trained(path: Path, batches: list[Batch], compute_dtype: str, directory: Path) -> list[float]:
    """Return the losses of a run; its model goes to `directory / "out"`."""
    options = headrace.Options(
        host_memory="8GiB",
        learning_rate=LEARNING_RATE,
        output=directory / "run",
        tokens_per_step=ROWS * LENGTH,
        sequence_length=LENGTH,
        compute_dtype=compute_dtype,
        max_grad_norm=CLIP,
    )
    with Engine.open(path, options) as engine:
        losses = [engine.step(batch).loss for batch in batches]
        engine.save_pretrained(directory / "out")
    return losses


def test_a_float32_run_ends_with_plain_pytorchs_weights(
    plain: tuple[list[float], dict[str, torch.Tensor]], in_float32: Path, batches: list[Batch], tmp_path: Path
) -> None:
    expected, weights = plain
    losses = trained(in_float32, batches, "float32", tmp_path)
    assert losses == pytest.approx(expected, rel=1e-5)
    with (
        safe_open(tmp_path / "out" / "model.safetensors", "pt") as ours,
        safe_open(in_float32 / "model.safetensors", "pt") as old,
    ):
        assert set(ours.keys()) == set(weights)
        moved = max(float((weights[name] - old.get_tensor(name)).abs().max()) for name in weights)
        for name, weight in weights.items():
            # A hundredth of the way: where a gradient is next to nothing, its rounding decides which way an element goes.
            torch.testing.assert_close(
                ours.get_tensor(name), weight, rtol=2e-6, atol=moved / 100, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_a_bfloat16_run_has_plain_pytorchs_losses_and_an_ordinary_model(
    model: Path, batches: list[Batch], tmp_path: Path
) -> None:
    losses = trained(model, batches, "bfloat16", tmp_path)
    expected, other = (narrow_losses(model, batches, attention) for attention in ("sdpa", "eager"))
    # Two runs of plain PyTorch that differ in the order of one sum are as far apart as bfloat16 rounds: ours may be twice that.
    noise = max(abs(a - b) / b for a, b in zip(expected, other, strict=True))
    assert 2**-10 < noise < 2**-5, noise
    assert losses == pytest.approx(expected, rel=2 * noise)
    assert sum(losses) == pytest.approx(sum(expected), rel=2**-9)
    assert sum(losses[STEPS // 2 :]) < sum(losses[: STEPS // 2])
    tokenizer, exported = (
        AutoTokenizer.from_pretrained(tmp_path / "out"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
    )
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt").input_ids
    made = exported.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True).strip()
