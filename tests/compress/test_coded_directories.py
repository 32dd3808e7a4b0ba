"""Directories whose weights are coded, by us or by others: what they decode to, and what is refused.

Run: pytest tests/compress/test_coded_directories.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_models import KINDS, write_coded
from safetensors.torch import load_file, save_file
from test_compression import decoded, tensors_of
from tiers import sampled
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from headrace.compress.decompression import decompress_model
from headrace.terms.errors import ModelError, RunDirectoryError


def test_what_was_compressed_is_decompressed(dense: Path, dense_int4: Any, tmp_path: Path) -> None:
    out = decompress_model(dense_int4[0] / "out", tmp_path / "plain")
    expected, found = decoded(dense_int4[0] / "out"), tensors_of(out)
    assert expected.keys() == found.keys() == tensors_of(dense).keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert json.loads((out / "config.json").read_text()) == json.loads((dense / "config.json").read_text())
    assert {path.name for path in out.iterdir()} == {path.name for path in dense.iterdir()}
    AutoModelForCausalLM.from_pretrained(out)


@pytest.mark.parametrize(
    "kind",
    sampled(KINDS, ("fp8", "mxfp4", "nf4", "zero points", "gguf Q4_K", "awq", "gptq by activations", "nvfp4", "fp8 tensor")),
)
def test_published_codes_are_read(kind: str, tmp_path: Path) -> None:
    coded, expected = write_coded(tmp_path, kind)
    found = tensors_of(decompress_model(coded, tmp_path / "plain"))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", sampled(["nf4", "nf4 once"], ["nf4"]))
def test_codes_of_nf4_may_be_stored_as_numbers_of_another_dtype(kind: str, storage: torch.dtype, tmp_path: Path) -> None:
    """As FSDP-QLoRA wants them: the same bytes, four or eight codes to a number."""
    coded, expected = write_coded(tmp_path, kind)
    for file in coded.glob("*.safetensors"):
        weights = load_file(file)
        for key in [key for key in weights if f"{key}.quant_map" in weights]:
            weights[key] = weights[key].flatten().view(storage)[:, None]
        save_file(weights, file, {"format": "pt"})
    found = tensors_of(decompress_model(coded, tmp_path / "plain"))
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "fp8 experts"])
def test_stock_transformers_decodes_to_the_same(kind: str, tmp_path: Path) -> None:
    coded, _ = write_coded(tmp_path, kind)
    how = Mxfp4Config(dequantize=True)
    if kind != "mxfp4":
        pytest.importorskip("accelerate", reason="transformers asks for it before it reads FP8")
        how = FineGrainedFP8Config(dequantize=True, weight_block_size=KINDS[kind][1]["weight_block_size"])
    ours = AutoModelForCausalLM.from_pretrained(decompress_model(coded, tmp_path / "plain"), dtype=torch.bfloat16).state_dict()
    stock = AutoModelForCausalLM.from_pretrained(coded, dtype=torch.bfloat16, quantization_config=how).state_dict()
    assert ours.keys() == stock.keys()
    assert all(torch.equal(ours[key], stock[key]) for key in ours)


def damage(directory: Path, change: Any) -> None:
    (file,) = sorted(directory.glob("*2-of*.safetensors")) or sorted(directory.glob("*.safetensors"))
    weights = load_file(file)
    change(weights)
    save_file(weights, file, {"format": "pt"})


def test_a_file_that_is_not_what_was_written(dense: Path, tmp_path: Path) -> None:
    from compressing import run

    run(dense, tmp_path)
    file = tmp_path / "out" / "model-00002-of-00004.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"00002.*is not the file that was written \(digest"):
        decompress_model(tmp_path / "out", tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


@pytest.mark.parametrize("part", ["weight_scale_inv", "weight"])
def test_parts_of_other_shapes_are_refused(part: str, tmp_path: Path) -> None:
    coded, _ = write_coded(tmp_path, "fp8")
    key = f"model.layers.0.mlp.up_proj.{part}"

    def cut(weights: dict[str, torch.Tensor]) -> None:
        weights[key] = weights[key][:-1].contiguous()

    damage(coded, cut)
    with pytest.raises(ModelError, match=r"up_proj.*(part weight_scale_inv should be|expected \(96, 64\))"):
        decompress_model(coded, tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ({"quant_method": "hqq", "bits": 4}, "coded by hqq, which is not read.*Convert it with hqq"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version .gemv."),
        ({"quant_method": "gptq", "bits": 3}, "bits .3."),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format .marlin."),
        ({"quant_method": "gptq", "bits": 4}, "coded by gptq, and none has parts of it"),
        ({"quant_method": "fp8"}, "without a block size"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "none has parts"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "FP4"),
        (
            {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"a": {"weights": {}}}},
            "int-quantized",
        ),
    ],
)
def test_other_codes_are_refused_by_name(described: dict[str, Any], words: str, tmp_path: Path) -> None:
    coded, _ = write_coded(tmp_path, "fp8")
    config = json.loads((coded / "config.json").read_text())
    (coded / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    with pytest.raises(ModelError, match=words):
        decompress_model(coded, tmp_path / "plain")


def test_a_directory_of_gguf_is_refused_by_name(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((dense / "config.json").read_bytes())
    (tmp_path / "model.Q4_K.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"holds GGUF; give the file itself, such as .*Q4_K"):
        decompress_model(tmp_path, tmp_path / "plain")


def test_a_model_that_is_not_coded(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not coded; there is nothing to decompress"):
        decompress_model(dense, tmp_path / "plain")
    with pytest.raises(RunDirectoryError, match="exists already"):
        decompress_model(dense, dense)
