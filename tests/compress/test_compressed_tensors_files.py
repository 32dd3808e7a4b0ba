"""Weights that compressed-tensors itself has coded decode to what it decodes them to.

Run: pytest tests/compress/test_compressed_tensors_files.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressing import write_model
from safetensors.torch import load_file, save_file
from test_compression import tensors_of

from headrace.compress.decompression import decompress_model

FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "w8a16": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "w8a16 groups": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32}),
    "w8a16 zero points": (
        "pack-quantized",
        {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "w4a16": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
    "nvfp4": ("nvfp4-pack-quantized", FP4),
    "fp8 tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8 channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
}


def sides(weight: torch.Tensor, weights: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Scales of the right shape, and zero points where they are asked for: how good they are is of no concern."""
    group = weights.get("group_size") or weight.shape[1]
    sizes = weight.float().view(len(weight), -1, group).abs().amax(dim=-1)
    match weights["strategy"]:
        case "tensor":
            return {"weight_scale": (sizes.max() / 448).bfloat16().view(1)}
        case "tensor_group":
            whole = (448 * 6 / sizes.max()).view(1)
            return {"weight_scale": (sizes / 6 * whole).to(torch.float8_e4m3fn).float(), "weight_global_scale": whole}
    largest = {"int": (1 << (weights["num_bits"] - 1)) - 1, "float": 448}[weights["type"]]
    found = {"weight_scale": (sizes / largest).bfloat16()}
    if not weights.get("symmetric", True):
        found["weight_zero_point"] = torch.arange(found["weight_scale"].numel()).view_as(sizes).remainder(9).to(torch.int8) - 4
    return found


@pytest.mark.parametrize("name", SCHEMES)
def test_its_files_decode_to_its_weights(name: str, tmp_path: Path) -> None:
    form, weights = SCHEMES[name]
    model = write_model(tmp_path / "model", "llama")
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True} if name == "fp8 channel" else None
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored, expected = {}, {}
    for key, weight in load_file(model / "model.safetensors").items():
        if ".layers." not in key or weight.dim() != 2:
            stored[key] = expected[key] = weight
            continue
        made = compressor.compress({"weight": weight, **sides(weight, weights)}, scheme)
        stem = key.removesuffix("weight")
        stored |= {f"{stem}{part}": tensor.contiguous() for part, tensor in made.items()}
        expected[key] = compressor.decompress(dict(made), scheme)["weight"].bfloat16()
    coded = tmp_path / "coded"
    coded.mkdir()
    save_file(stored, coded / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    described = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
    }
    (coded / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    found = tensors_of(decompress_model(coded, tmp_path / "plain"))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
