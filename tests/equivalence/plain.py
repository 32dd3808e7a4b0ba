"""Tiny configurations, batches, short runs of the engine, and a plain PyTorch trainer to compare them with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from short_run import short_run
from transformers import AutoModelForCausalLM

ROWS, LENGTH = 6, 32
# Changes of a plan: micro-batches of two rows.
SPLIT = {"micro_batch_sequences": 2, "num_micro_batches": -(-ROWS // 2), "accumulate": True, "loss_chunk_tokens": LENGTH}
SHAPE = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SHAPE, "tie_word_embeddings": False},
    "llama-tied": {"model_type": "llama", **SHAPE, "tie_word_embeddings": True},
    "gpt2-dropout": {"model_type": "gpt2", "vocab_size": 384, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128},
    "mamba2": {
        "model_type": "mamba2",
        **{key: SHAPE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")},
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
        "residual_in_fp32": True,
    },
    "mixtral-aux": {"model_type": "mixtral", **SHAPE, "num_local_experts": 4, "output_router_logits": True},
    "many-experts": {
        "model_type": "qwen3_moe",
        **SHAPE,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "moe_intermediate_size": 64,
        "num_experts": 16,
        "num_experts_per_tok": 2,
    },
    "gpt-oss": {"model_type": "gpt_oss", **SHAPE, "head_dim": 16, "num_local_experts": 4, "sliding_window": 16},
    "wide": {"model_type": "llama", **SHAPE, "intermediate_size": 4096, "tie_word_embeddings": False},
    "phi3": {"model_type": "phi3", **SHAPE, "pad_token_id": 0},
    "gemma3": {"model_type": "gemma3_text", **SHAPE, "head_dim": 16, "sliding_window": 16, "tie_word_embeddings": True},
    "deepseek": {
        "model_type": "deepseek_v3",
        **SHAPE,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
    },
}


# Two placements as far from one another as any, of a model some of whose units have families of their own.
FAR_PLACEMENTS: dict[str, dict[str, Any]] = {
    "SSD, plain": {
        "adjust": {"chunk_elements": 2048, "resident_states": (), "host_slots": 2, "prefetch": 1, "device_slots": 2},
        "interpreter": "plain",
    },
    "a device, states in memory, late": {
        "adjust": {"update_policy": "deferred", "late_units": lambda plan: plan.trained_units, "host_slots": 4}
        | {"resident_states": lambda plan: plan.trained_units},
        "device_memory": "1GiB",
    },
}


def exported(engine: Any, out: Path) -> dict[str, torch.Tensor]:
    """Return the weights that an engine exports."""
    engine.save_pretrained(out)
    return load_file(out / "model.safetensors")


def everything(plan: Any) -> tuple[int, ...]:
    """Return all units of a plan."""
    return tuple(range(len(plan.units)))


def batch_of(sequences: int, length: int, seed: int, *, vocabulary: int = 384, padded: bool = False) -> dict[str, torch.Tensor]:
    """Return a batch with some labels masked; with `padded`, rows of unequal length."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, vocabulary, (sequences, length), generator=generator)
    labels = ids.clone()
    labels[torch.rand(ids.shape, generator=generator) < 0.2] = -100
    batch = {"input_ids": ids, "labels": labels}
    if padded:
        mask = torch.ones_like(ids)
        for row in range(sequences):
            mask[row, length - 3 * row :] = 0
        batch["attention_mask"] = mask
        labels[mask == 0] = -100
    return batch


def packed(padded: dict[str, torch.Tensor], lengths: Sequence[int], rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Return the samples of a batch, `lengths` of its rows, as rows that hold those named by `rows` one after the other."""
    shape = (len(rows), padded["input_ids"].shape[1])
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "position_ids", "token_mask")}
    batch["labels"] = torch.full(shape, -100)
    for row, samples in enumerate(rows):
        at = 0
        for sample in samples:
            here, there = (row, slice(at, at + lengths[sample])), (sample, slice(lengths[sample]))
            batch["input_ids"][here], batch["labels"][here] = padded["input_ids"][there], padded["labels"][there]
            batch["labels"][row, at] = -100  # what comes first is predicted by nothing
            batch["position_ids"][here], batch["token_mask"][here] = torch.arange(lengths[sample]), 1
            at += lengths[sample]
        batch["position_ids"][row, at:] = torch.arange(shape[1] - at)
    return batch


def is_decayed(model: torch.nn.Module, name: str) -> bool:
    """Return whether a parameter is a matrix: what the class of its own module says, whatever the path to it."""
    owner, _, own = name.rpartition(".")
    module = model.get_submodule(owner)
    return model.get_parameter(name).dim() >= 2 and not own.endswith("bias") and "norm" not in type(module).__name__.lower()


class PlainTrainer:
    """Stock transformers and `torch.optim.AdamW` in float32, everything in memory."""

    def __init__(
        self, path: Path, lr: float, weight_decay: float, max_grad_norm: float | None, kind: Any = AutoModelForCausalLM
    ) -> None:
        self.model = kind.from_pretrained(path, dtype=torch.float32).train()
        self.model.config.use_cache = False
        decayed = [p for n, p in self.model.named_parameters() if is_decayed(self.model, n)]
        rest = [p for n, p in self.model.named_parameters() if not is_decayed(self.model, n)]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
        self.max_grad_norm = max_grad_norm

    def step(self, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
        self.optimizer.zero_grad()
        loss = self.model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm or float("inf"))
        self.optimizer.step()
        return loss.item(), norm.item()


def check_close(got: torch.Tensor, want: torch.Tensor, name: str, *, moved: float = 3e-3) -> None:
    """Raise AssertionError unless weights are equal to rounding after AdamW has moved none by more than `moved`.

    It moves a weight by the sign of its gradient where that is all rounding, so one weight in five thousand may be further off.
    """
    far = (got - want).abs() - 2e-5 - 1e-4 * want.abs()
    assert float(far.max()) < moved / 10, f"{name}: {float(far.max())} too far"
    assert int((far > 0).sum()) <= want.numel() // 5000, f"{name}: {int((far > 0).sum())} of {want.numel()} are off"


def train(
    path: Path,
    run_directory: Path,
    *,
    steps: int = 3,
    padded: bool = False,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and final weights of a short run."""
    batches = [batch_of(ROWS, LENGTH, seed, padded=padded) for seed in range(steps)]
    return short_run(path, run_directory, batches, **options)
