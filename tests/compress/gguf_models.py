"""GGUF files of tiny Llamas, written by the package `gguf` as llama.cpp's converter writes them."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from safetensors.torch import load_file

# Where in a block of a type that the package does not write its float16 numbers begin, and what they are.
_HALVES = {"Q4_K": {0: 0.004, 2: 0.01}, "Q5_K": {0: 0.002, 2: 0.01}, "Q6_K": {208: 0.0002}}


def write_gguf(model: Path, file: Path, kind: str, more: Mapping[str, int] | None = None) -> dict[str, torch.Tensor]:
    """Write the Llama in `model` with matrices of type `kind`; return the weights that it then stands for, by their names.

    Of types that the package does not write, blocks are random. `more` are further numbers of the file by their keys.
    """
    config, vocabulary = json.loads((model / "config.json").read_text()), json.loads((model / "tokenizer.json").read_text())
    heads, key_heads, blocks = (config[f"num_{name}"] for name in ("attention_heads", "key_value_heads", "hidden_layers"))
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(blocks)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    known = {number: token for token, number in vocabulary["model"]["vocab"].items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([known.get(number, f"<unused{number}>") for number in range(config["vocab_size"])])
    writer.add_token_types([3 if number == 0 or number not in known else 1 for number in range(config["vocab_size"])])
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    for key, value in (more or {}).items():
        writer.add_uint32(key, value)
    names, expected = get_tensor_name_map(MODEL_ARCH.LLAMA, blocks), {}
    for name, tensor in load_file(model / "model.safetensors").items():
        place = names.get_name(name, try_suffixes=(".weight", ".bias"))
        weights = tensor.float().numpy()
        of = heads if ".q_proj." in name else key_heads if ".k_proj." in name else 0
        if of:  # pairs of a rotation lie side by side
            weights = weights.reshape(of, 2, -1, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)
        own = GGMLQuantizationType["F32" if weights.ndim == 1 else kind]
        stored = _stored(np.ascontiguousarray(weights), own)
        writer.add_tensor(place, stored, raw_dtype=own)
        found = quants.dequantize(stored, own).reshape(weights.shape)
        if of:
            found = found.reshape(of, -1, 2, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)
        expected[name] = torch.from_numpy(np.ascontiguousarray(found))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _stored(weights: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    if kind.name not in _HALVES:
        return quants.quantize(weights, kind)
    size = quants.GGML_QUANT_SIZES[kind][1]
    blocks = np.random.default_rng(weights.size).integers(0, 256, (weights.shape[0], weights.shape[1] // 256, size), np.uint8)
    for at, value in _HALVES[kind.name].items():
        blocks[:, :, at : at + 2] = np.array([value], np.float16).view(np.uint8)
    return blocks.reshape(weights.shape[0], -1)
