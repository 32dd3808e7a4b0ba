"""One block of real size of each family, with random weights, and what plain PyTorch makes of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

COMMON = {"vocab_size": 512, "num_hidden_layers": 1, "max_position_embeddings": 256, "tie_word_embeddings": False}
BLOCKS: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Gemma-2-9B": {
        "model_type": "gemma2",
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 32,
        "layer_types": ["sliding_attention"],
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
}


def save_block(directory: Path, name: str) -> Path:
    """Write a model of one block, with random weights of bfloat16, and return its folder."""
    torch.manual_seed(1)
    config = {**COMMON, **BLOCKS[name]}
    made = CONFIG_MAPPING[config.pop("model_type")](**config)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).float()  # float32 in files: nothing is rounded there
    path = directory / name
    model.save_pretrained(path)
    return path


def expected(
    path: Path, batch: dict[str, torch.Tensor], device: str = "cpu"
) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
    """Return plain PyTorch's loss, last logits and gradients, in float32, computed on `device`; tensors are on the host."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).train()
    out = model(**{name: tensor.to(device) for name, tensor in batch.items()}, use_cache=False)
    out.loss.backward()
    gradients = {name: parameter.grad.cpu() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return out.loss.item(), out.logits[:, -1].detach().cpu(), gradients


def far(found: torch.Tensor, want: torch.Tensor) -> float:
    """Return the distance of two tensors relative to the second's length."""
    return float((found.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def joined(found: dict[str, torch.Tensor], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors as the model has them in memory: stored experts in the stacks that transformers makes of them."""
    stack: Callable[[str, str], torch.Tensor] = lambda stem, own: torch.stack(  # noqa: E731
        [found[f"{stem}.{number}.{own}.weight"] for number in range(BLOCKS["Qwen3-30B-A3B"]["num_experts"])]
    )
    out = {name: tensor for name, tensor in found.items() if name in like}
    for name in like.keys() - out.keys():
        stem = name.rpartition(".")[0]
        whole = stack(stem, "down_proj") if name.endswith("down_proj") else None
        out[name] = torch.cat([stack(stem, "gate_proj"), stack(stem, "up_proj")], dim=1) if whole is None else whole
    return out
