"""Configurations of models that are too large to exist here: nothing but their config.json is ever made."""

import json
from pathlib import Path
from typing import Any

from transformers import GPT2Config, LlamaConfig


def llama_70b() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        vocab_size=128256,
        max_position_embeddings=8192,
    )


def gpt3_175b() -> GPT2Config:
    return GPT2Config(n_embd=12288, n_layer=96, n_head=96, n_positions=2048)


def llama_small() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=688,
        vocab_size=1000,
        max_position_embeddings=1024,
    )


def saved(directory: Path, config: Any, **changes: Any) -> Path:
    """Write config.json; a change to None removes the field."""
    values = json.loads(config.to_json_string()) | changes
    directory.mkdir(exist_ok=True)
    text = json.dumps({name: value for name, value in values.items() if not (name in changes and value is None)})
    (directory / "config.json").write_text(text)
    return directory
