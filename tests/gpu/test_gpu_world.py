"""The helpers of this folder on the CPU, so that they still work on the day on which there is a GPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu_world import LENGTH, ROWS, PlainTrainer, batch_of, train_on_cpu

from headrace.engine.trainer import Engine

STEPS = 2


@pytest.fixture
def gpu() -> torch.device:
    """Stand for the GPU that the other tests here need."""
    return torch.device("cpu")


@pytest.mark.wide
def test_trains_on_a_separate_device_like_plain_pytorch(
    gpu: torch.device, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_dir("llama")
    plain = PlainTrainer(path, gpu, 1.0)
    expected = [plain.step(batch_of(ROWS, LENGTH, seed)) for seed in range(STEPS)]
    separate: list[bool] = []

    def inspect(engine: Engine) -> None:
        separate.append(engine.plan.separate_device)

    losses, _ = train_on_cpu(
        monkeypatch, path, tmp_path / "run", steps=STEPS, compute_dtype="float32", max_grad_norm=1.0, inspect=inspect
    )
    assert separate == [True]
    assert losses == pytest.approx(expected, rel=2e-5)
