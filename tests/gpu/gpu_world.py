"""Small models, batches, runs of the engine on a chosen machine, and plain PyTorch on the same device to compare with."""

from pathlib import Path
from typing import Any

import torch
from short_run import short_run
from transformers import AutoConfig, AutoModelForCausalLM

import headrace
import headrace.engine.subject
from headrace.machine.cpu import CpuMachine

ROWS, LENGTH = 6, 64
_SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SHAPE, "tie_word_embeddings": False},
    "llama-tied": {"model_type": "llama", **_SHAPE, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 512,
        "n_embd": 128,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 256,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "gpt2-dropout": {"model_type": "gpt2", "vocab_size": 512, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 256},
    "gemma3": {"model_type": "gemma3_text", **_SHAPE, "head_dim": 32, "sliding_window": 16, "tie_word_embeddings": True},
    "mixtral-aux": {"model_type": "mixtral", **_SHAPE, "num_local_experts": 4, "output_router_logits": True},
}


def save_model(directory: Path, name: str, dtype: str) -> Path:
    """Write a random model of `MODELS`; weights away from their initial values, where mistakes would be invisible."""
    values = dict(MODELS[name])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    return directory


def batch_of(sequences: int, length: int, seed: int, *, vocabulary: int = 512) -> dict[str, torch.Tensor]:
    """Return a batch in which a fifth of the labels is masked."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, vocabulary, (sequences, length), generator=generator)
    labels = ids.clone()
    labels[torch.rand(ids.shape, generator=generator) < 0.2] = -100
    return {"input_ids": ids, "labels": labels}


def train(
    path: Path,
    run_directory: Path,
    *,
    steps: int = 3,
    adjust: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and final weights of a short run with micro-batches of two rows, if `adjust` does not change that."""
    batches = [batch_of(ROWS, LENGTH, seed) for seed in range(steps)]
    return short_run(
        path, run_directory, batches, adjust={**micro_batches(2), **(adjust or {})}, **{"device_memory": "2GiB"} | options
    )


def micro_batches(rows: int) -> dict[str, Any]:
    """Return the plan's fields for micro-batches of `rows` rows."""
    count = -(-ROWS // rows)
    return {"micro_batch_sequences": rows, "num_micro_batches": count, "accumulate": count > 1}


def train_on_cpu(monkeypatch: Any, *args: Any, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Run `train` with the CPU as a separate device, although there is a GPU."""
    with monkeypatch.context() as patch:
        patch.setattr(headrace.engine.subject, "this_machine", lambda device_bytes: CpuMachine(separate_device=True))
        return train(*args, **options)


class PlainTrainer:
    """Stock transformers and `torch.optim.AdamW` in float32, everything on one device."""

    def __init__(self, path: Path, device: torch.device, max_grad_norm: float | None) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).train()
        self.model.config.use_cache = False
        self.device, self.max_grad_norm = device, max_grad_norm
        decayed = [p for n, p in self.model.named_parameters() if p.dim() >= 2 and "norm" not in n.lower()]
        rest = [p for n, p in self.model.named_parameters() if not (p.dim() >= 2 and "norm" not in n.lower())]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        self.optimizer.zero_grad()
        loss = self.model(**{name: tensor.to(self.device) for name, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm or float("inf"))
        self.optimizer.step()
        return float(loss.detach())
