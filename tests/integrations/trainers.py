"""What tests of Trainers share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

from headrace.integrations.transformers import HeadraceTrainer

Make = Callable[..., HeadraceTrainer]
TEXTS = [f"water number {index} flows " * (1 + index % 3) for index in range(24)]
USUAL: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 6,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": 7,
}


def weights(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    assert found
    return found


def logged(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry and "train_runtime" not in entry]


class StopAfter(TrainerCallback):
    """Stops after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step
