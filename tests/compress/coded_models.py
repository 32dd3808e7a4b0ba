"""Model directories in the codes that models are published in, written as their publishers write them."""

import json
from pathlib import Path
from typing import Any

import torch
from compressing import EXPERTS, SIZES, write_model
from gguf_models import write_gguf
from safetensors.torch import load_file, save_file

from headrace.codec import Codec, Parts
from headrace.codec.published import Fp4Blocks, Fp8Blocks, Int8Rows, IntGroups, Mxfp4, Nf4, PackQuantized
from headrace.model.gguf.gguf_directory import gguf_directory

# The method, what its configuration says besides, and the kind of model.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("llama", {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}),
    "fp8 experts": ("mixtral", {"quant_method": "fp8", "weight_block_size": [32, 64], "activation_scheme": "dynamic"}),
    "mxfp4": ("gpt_oss", {"quant_method": "mxfp4"}),
    "nf4": ("llama", {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "nf4 once": ("llama", {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "zero points": (
        "llama",
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {}}},
    ),
}


def _groups(form: str, activations: Any = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


_LEFT = {"modules_to_not_convert": ["lm_head", "gate"]}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32}
_FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
_FP8 = {"quant_method": "fp8", "weight_block_size": [32, 64], "activation_scheme": "dynamic"}
KINDS |= {
    "awq": ("llama", {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "gptq": ("llama", _GPTQ),
    "gptq experts": ("mixtral", _GPTQ | {"checkpoint_format": "gptq_v2"} | _LEFT),
    "gptq by activations": ("llama", _GPTQ | {"bits": 8, "desc_act": True}),
    "w8a16": ("llama", _groups("pack-quantized", **_INT8)),
    "nvfp4": ("llama", _groups("nvfp4-pack-quantized", **_FP4)),
    "nvfp4 modelopt": ("llama", {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}),
    "fp8 channel": ("llama", _groups("float-quantized", {"num_bits": 8, "dynamic": True}, **_CHANNEL)),
    "fp8 tensor": ("llama", {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp4 experts": ("mixtral", _FP8 | {"expert_dtype": "fp4"} | _LEFT),
    "int8": ("llama", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}
KINDS |= {f"gguf {kind}": ("llama", {}) for kind in ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")}
KINDS["zero points"][1]["config_groups"]["group_0"] = {"weights": {"num_bits": 4, "type": "int", "symmetric": False}}
_WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}  # a block of GGUF has up to 256 numbers
_GPT_OSS = {key: value for key, value in EXPERTS.items() if key != "max_position_embeddings"}


def write_coded(folder: Path, kind: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a coded model into `folder / "coded"`; return that, and the weights that it stands for, by stored name."""
    architecture, described = KINDS[kind]
    if kind.startswith("gguf"):
        model = write_model(folder / "model", tie_word_embeddings=True, **_WIDE)
        expected = write_gguf(model, folder / "model.gguf", kind.removeprefix("gguf "))
        return gguf_directory(folder / "model.gguf", folder / "cache"), expected
    sizes = _GPT_OSS | {"head_dim": 16, "intermediate_size": 96} if architecture == "gpt_oss" else SIZES
    model = write_model(folder / "model", architecture, **(sizes if architecture != "mixtral" else EXPERTS))
    stored, expected = {}, {}
    for key, weight in load_file(model / "model.safetensors").items():
        is_matrix = ".layers." in key and weight.dim() == 2 and "gate.weight" not in key and "router" not in key
        stack = kind == "mxfp4" and weight.dim() == 3
        if (is_matrix and kind != "mxfp4" and key.endswith(".weight")) or stack:
            codec = _codec(kind, weight, key)
            flat = weight.reshape(-1, weight.shape[-1])
            parts = dict(codec.encode(flat))
            if kind == "gptq by activations":  # columns of a group that are no neighbours
                parts["g_idx"] = parts["g_idx"][torch.randperm(flat.shape[1], generator=torch.Generator().manual_seed(0))]
            decoded = torch.empty_like(flat, dtype=torch.float16 if kind.startswith(("awq", "gptq")) else None)  # as scales are
            codec.decode(parts, decoded, range(len(flat)))
            expected[key] = decoded.view(weight.shape)
            stored |= _stored(kind, key, weight, parts)
        else:
            stored[key] = expected[key] = weight
    coded = folder / "coded"
    coded.mkdir()
    save_file({key: value.contiguous() for key, value in stored.items()}, coded / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (coded / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    return coded, expected


def _codec(kind: str, weight: torch.Tensor, key: str) -> Codec:
    match kind.split():
        case ["fp8", "channel"]:
            return Fp8Blocks(1, weight.shape[1], "bfloat16")
        case ["fp8", "tensor"]:
            return Fp8Blocks(*weight.shape)
        case ["fp4", _] if "experts" in key:
            return Fp4Blocks(32, "float8_e8m0fnu", "")
        case ["fp8" | "fp4", *_]:
            return Fp8Blocks(*KINDS[kind][1]["weight_block_size"])
        case ["mxfp4"]:
            return Mxfp4(weight.shape[1])
        case ["nf4", *_]:
            return Nf4(nested=kind == "nf4")
        case ["awq"]:
            return IntGroups("awq", 32)
        case ["gptq", *_]:
            said = KINDS[kind][1]
            layout = said.get("checkpoint_format", "gptq")
            return IntGroups(layout, 32, bits=said["bits"], ordered=said.get("desc_act", False))
        case ["w8a16"]:
            return IntGroups("packed", 32, "bfloat16", 8, symmetric=True)
        case ["nvfp4", *more]:
            return Fp4Blocks(whole="weight_scale_2" if more else "weight_global_scale")
        case ["int8"]:
            return Int8Rows()
        case _:
            return PackQuantized(32, symmetric=False)


def _stored(kind: str, key: str, weight: torch.Tensor, parts: Parts) -> dict[str, torch.Tensor]:
    stem = key.removesuffix("weight")
    if kind == "fp8 channel":
        return {key: parts["weight"], f"{stem}weight_scale": parts["weight_scale_inv"]}
    if kind == "fp8 tensor":
        scale = parts["weight_scale_inv"].view(())
        return {key: parts["weight"], f"{stem}weight_scale": scale, f"{stem}input_scale": torch.tensor(0.5)}
    if kind.startswith(("fp8", "fp4")) and "weight" in parts:
        return {key: parts["weight"], f"{key}_scale_inv": parts["weight_scale_inv"]}
    if kind == "fp4 experts":
        return {key: parts["weight_packed"].view(torch.int8), f"{key}_scale_inv": parts["weight_scale"]}
    if kind == "nvfp4 modelopt":
        shared = parts["weight_scale_2"].view(())
        scales = {f"{stem}weight_scale": parts["weight_scale"], f"{stem}weight_scale_2": shared}
        return {key: parts["weight_packed"], **scales, f"{stem}input_scale": torch.tensor(0.5)}
    if kind == "int8":
        return {key: parts["weight"], f"{stem}SCB": parts["SCB"], f"{stem}weight_format": torch.tensor(0, dtype=torch.uint8)}
    if kind == "mxfp4":
        return {f"{key}_{name}": tensor for name, tensor in parts.items()}
    if not kind.startswith("nf4"):
        order = {f"{stem}g_idx": torch.arange(weight.shape[1]).int() // 32} if kind == "gptq" else {}
        shape = {} if "qweight" in parts else {f"{stem}weight_shape": torch.tensor(weight.shape)}
        return {f"{stem}{name}": tensor for name, tensor in parts.items()} | shape | order
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    if "nested_offset" in parts:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(parts["nested_offset"])}
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    named = {f"{key}.{name}": tensor for name, tensor in parts.items() if name not in ("weight", "nested_offset")}
    return {key: parts["weight"], f"{key}.quant_state.bitsandbytes__nf4": text} | named
