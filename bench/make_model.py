"""Writes the random bf16 checkpoint that all contestants start from: fixed seed, safetensors, tokenizer not needed."""

import argparse
from pathlib import Path

import torch
from shapes import MODEL_SEED, SHAPES
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--size", choices=list(SHAPES), required=True)
    arguments.add_argument("directory", type=Path)
    options = arguments.parse_args()
    shape = SHAPES[options.size]
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(MODEL_SEED)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
    found = sum(parameter.numel() for parameter in model.parameters())
    if found != shape.parameters:
        raise SystemExit(f"shape {options.size} says {shape.parameters} parameters, the model has {found}")
    # Several shards, so that loading by offset across shards is part of what is measured.
    model.save_pretrained(options.directory, max_shard_size="1GB")


if __name__ == "__main__":
    main()
