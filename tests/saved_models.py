"""Save stock models, and import what was saved."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tiny_architectures import CONFIGS, make_config, make_plain
from transformers import AutoModelForCausalLM, Qwen4ExpTextConfig

from headrace.model import Chain, Checkpoint, import_unit
from headrace.terms.options.optimizer import Optimizer
from headrace.update.rules.adamw import adamw_planes

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def save(tmp_path: Path, name: str = "llama", dtype: str = "bfloat16", **options: Any) -> tuple[Path, Any]:
    """Save a stock model with save_pretrained; return its directory and configuration."""
    config = make_config(CONFIGS[name])
    model = make_plain(config, DTYPES[dtype])
    with torch.no_grad():
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.rand_like(buffer))
    model.save_pretrained(tmp_path / "model", **options)
    return tmp_path / "model", config


def save_with_tables(path: Path, dtype: torch.dtype) -> Path:
    """Save a tiny Qwen4-Exp, two of whose three blocks have a table of n-grams, rows of four numbers in eleven tensors."""
    config = Qwen4ExpTextConfig(
        vocab_size=176,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "linear_attention", "indexed_attention"],
        indexer_n_heads=4,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=64,
        indexer_compress_ratio=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        hc_lowrank=11,
        ple_layer_ids=[1, 2],
        ple_embed_dim=64,
        ngram_vocab_size_base=40,
        make_ngram_vocab_size_divisible_by=11,
        split_ngram_parts=11,
        eos_token_id=1,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return path


def add_unused(directory: Path, count: int) -> list[str]:
    """Add tensors that no model has to the sharded files of `directory`; return their names."""
    tensors = {f"model.extra.{each}.weight": torch.full((3,), float(each)) for each in range(count)}
    save_file(tensors, directory / "more.safetensors", metadata={"format": "pt"})
    index = directory / "model.safetensors.index.json"
    found = json.loads(index.read_text(encoding="utf-8"))
    found["weight_map"] |= dict.fromkeys(tensors, "more.safetensors")
    index.write_text(json.dumps(found), encoding="utf-8")
    return list(tensors)


def import_all(directory: Path, compute_dtype: str) -> tuple[Checkpoint, Chain, list[Any], list[bool]]:
    checkpoint = Checkpoint.open(directory)
    chain = Chain.from_config(checkpoint.config, compute_dtype, Optimizer())
    weights = chain.attach(checkpoint)
    planes, exact = [], []
    kinds = adamw_planes(compute_dtype)
    master = next((plane for plane in kinds.states if plane.name in ("lo", "w")), None)
    for layout in chain.layouts:
        weight = np.full(layout.num_elements, 77, kinds.weight.dtype)
        rest = None if master is None else np.full(layout.num_elements, 77, master.dtype)
        exact.append(import_unit(weights, layout, weight, rest))
        planes.append((weight, rest))
    return checkpoint, chain, planes, exact


def values_of(chain: Chain, planes: list[Any]) -> dict[str, torch.Tensor]:
    """The exact float32 master of every parameter, computed the slow way."""
    out = {}
    for layout, (weight, master) in zip(chain.layouts, planes, strict=True):
        if weight.dtype == np.uint16:
            flat = ((weight.astype(np.int64) << 16) + master.astype(np.int64)).astype(np.uint32).view(np.float32)
        else:
            flat = weight if master is None else master
        for spec in layout.parameters:
            out[spec.name] = torch.from_numpy(flat[spec.offset : spec.offset + spec.num_elements].reshape(spec.shape).copy())
    return out


def own_loss(model: Path, samples: Sequence[tuple[list[int], list[bool]]]) -> tuple[float, int]:
    """Return the mean loss of marked tokens, and their number, of stock transformers in float32, one sample at a time."""
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for ids, trained in samples:
            logits = stock(torch.tensor([ids])).logits[0, :-1].double()
            picked = torch.tensor(trained[1:])
            losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
            total, tokens = total + float(losses[picked].sum()), tokens + int(picked.sum())
    return total / tokens, tokens


@contextmanager
def touched(model: Path) -> Iterator[None]:
    """While entered, one of a model's files says that it has changed."""
    shard = next(model.glob("*.safetensors"))
    accessed, changed = shard.stat().st_atime_ns, shard.stat().st_mtime_ns
    os.utime(shard, ns=(accessed, changed + 1))
    try:
        yield
    finally:
        os.utime(shard, ns=(accessed, changed))
