"""A trial keeps a block of each kind that the whole model has, however the configuration says which layer is of which kind.

Run: pytest tests/model/test_trial_layers.py
"""

import json
from typing import Any

import pytest
import torch
from tiers import sampled
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from headrace.model import self_check
from headrace.model.blocks.find_blocks import find_blocks
from headrace.model.seats.generation_check import check_generation
from headrace.model.trials.probe import probe
from headrace.model.trials.thresholds import architecture_key

SMALL_HEADS = {"num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 384}
EXPERIMENT = {
    "eos_token_id": 1,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # Kinds follow from the layer's index: attention at the fifth of eight, experts at every second.
    "jamba": ("jamba", {}),
    "jamba late": ("jamba", {"attn_layer_offset": 7, "attn_layer_period": 9}),
    "jamba dense": ("jamba", {"num_experts": 1, "attn_layer_offset": 3}),
    # A pattern that repeats.
    "recurrent-gemma": ("recurrent_gemma", {}),
    "recurrent-gemma mostly attention": ("recurrent_gemma", {"block_types": ["recurrent", "attention", "attention"]}),
    # Layers that a list names from 1.
    "third of qwen4": ("qwen4_exp_text", {**EXPERIMENT, "ple_layer_ids": [3]}),
    "fifth of qwen4": ("qwen4_exp_text", {**EXPERIMENT, "ple_layer_ids": [5]}),
    "several of qwen4": ("qwen4_exp_text", {**EXPERIMENT, "ple_layer_ids": [1, 6, 39]}),
    # Widths of heads that fit one another.
    "dots3": ("dots3_note_text", {}),
    "deepseek-v4": ("deepseek_v4", {}),
    "deepseek-v4 with heads of 16": ("deepseek_v4", {**SMALL_HEADS, "head_dim": 16, "qk_rope_head_dim": 8}),
    "deepseek-v4 with heads of 32": ("deepseek_v4", {**SMALL_HEADS, "head_dim": 32, "qk_rope_head_dim": 16}),
    "deepseek-v4 with heads of 64": (
        "deepseek_v4",
        {**SMALL_HEADS, "head_dim": 64, "qk_rope_head_dim": 32, "index_head_dim": 32},
    ),
    "llama": ("llama", {}),
}


def kinds_of(config: Any) -> set[tuple[frozenset[str], frozenset[tuple[str, int]]]]:
    with torch.device("meta"):
        blocks = find_blocks(AutoModelForCausalLM.from_config(config)).modules

    def kind(block: nn.Module) -> tuple[frozenset[str], frozenset[tuple[str, int]]]:
        names = {(name.rpartition(".")[2], parameter.dim()) for name, parameter in block.named_parameters()}
        return frozenset(type(module).__name__ for module in block.modules()), frozenset(names)

    return {kind(block) for block in blocks}


@pytest.mark.wide
@pytest.mark.parametrize("case", sampled(CASES, ("jamba", "recurrent-gemma", "fifth of qwen4", "dots3", "llama")))
def test_each_kind_of_block_is_tried_in_training_and_in_generation(case: str) -> None:
    kind, values = CASES[case]
    config = CONFIG_MAPPING[kind](**values)
    tiny = json.loads(architecture_key(config))
    small = CONFIG_MAPPING[kind](**{key: value for key, value in tiny.items() if key != "transformers_version"})
    assert kinds_of(small) == kinds_of(config)
    assert small.num_hidden_layers <= 17
    self_check(config)
    probe(config)
    check_generation(config)
