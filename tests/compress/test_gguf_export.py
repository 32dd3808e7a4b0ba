"""Models written as GGUF files: read back they are what they were, and what a file cannot say is refused.

Run: pytest tests/compress/test_gguf_export.py
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressing import write_model
from gguf import GGMLQuantizationType, GGUFReader, quants
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiers import sampled
from transformers import AutoTokenizer, GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import LlamaConfig

from headrace.apps import refuse_unwritable, write_gguf
from headrace.apps.gguf.gguf_words import WordsOf
from headrace.model import Checkpoint
from headrace.model.gguf.gguf_directory import gguf_directory, read_gguf_config
from headrace.model.gguf.gguf_rotations import FACTORS, llama3_factors, rotation_of
from headrace.model.stored.safetensors_file import read_bytes
from headrace.terms.errors import ModelError

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read_back(file: Path, scratch: Path) -> dict[str, torch.Tensor]:
    tensors = Checkpoint.open(gguf_directory(file, scratch / "cache"), decode=True).tensors
    return {
        name: torch.from_numpy(np.concatenate([piece.copy() for piece in read_bytes(tensor)]))
        .view({"BF16": torch.bfloat16, "F32": torch.float32}[tensor.dtype])
        .view(tensor.shape)
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("architecture", "config"),
    sampled(
        [
            ("llama", {}),
            ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
            ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
            ("mistral", {"sliding_window": None}),
            ("qwen2", {"num_key_value_heads": 4}),
            ("qwen3", {"head_dim": 128}),
            ("phi3", {"pad_token_id": 0}),
            ("starcoder2", {"sliding_window": None}),
        ]
    ),
)
def test_a_model_is_read_back_as_it_was(architecture: str, config: dict[str, Any], tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", architecture, **config)
    write_gguf(model, tmp_path / "model.gguf")
    expected, found = load_file(model / "model.safetensors"), read_back(tmp_path / "model.gguf", tmp_path)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
    text = "Überläufe: 42 m³/s\n\n\t water flows"
    own, other = (AutoTokenizer.from_pretrained(each) for each in (model, gguf_directory(tmp_path / "model.gguf", tmp_path)))
    assert own(text).input_ids == other(text).input_ids


@pytest.mark.parametrize("ends", [[0, 7], [0, 7, 5], [7, 5, 3, 0]])
def test_all_tokens_that_end_answers_are_read_back(ends: list[int], tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    write_gguf(model, tmp_path / "model.gguf")
    found = GenerationConfig.from_pretrained(gguf_directory(tmp_path / "model.gguf", tmp_path / "cache")).eos_token_id
    assert sorted(found) == sorted(ends)


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_type_that_is_asked_for_holds_what_the_package_makes(kind: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    write_gguf(model, tmp_path / "model.gguf", kind)
    expected = load_file(model / "model.safetensors")["model.layers.1.mlp.down_proj.weight"].float().numpy()
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    found = tensors["blk.1.ffn_down.weight"]
    assert np.array_equal(np.asarray(found.data), quants.quantize(expected, GGMLQuantizationType[kind.upper()]))
    assert tensors["blk.1.ffn_norm.weight"].tensor_type.name == "F32"


def test_rows_of_a_piece_are_rows_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model")
    write_gguf(model, tmp_path / "whole.gguf", "q8_0")
    monkeypatch.setattr("headrace.apps.gguf.gguf_writing._PIECE_NUMBERS", 100)
    write_gguf(model, tmp_path / "pieces.gguf", "q8_0")
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "pieces.gguf").read_bytes()


@pytest.mark.parametrize(
    ("architecture", "config", "word"),
    [
        ("mixtral", {}, "mixtral has no form in GGUF"),
        ("mistral", {"sliding_window": 8}, "cannot say sliding_window"),
        ("llama", {"rope_parameters": {**LLAMA3, "rope_type": "yarn", "factor": 2.0}}, "cannot say rope_parameters"),
        ("gemma2", {"head_dim": 16}, "another form"),
    ],
)
def test_what_a_file_cannot_say_is_refused(architecture: str, config: dict[str, Any], word: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", architecture, **config)
    with pytest.raises(ModelError, match=word):
        write_gguf(model, tmp_path / "model.gguf")
    assert [each.name for each in tmp_path.iterdir()] == ["model"], "nothing is left"


def test_numbers_beyond_float16_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", rms_norm_eps=1e-5)
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][7, 3] = 1e30
    from safetensors.torch import save_file

    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ModelError, match="--outtype bf16"):
        write_gguf(model, tmp_path / "model.gguf", "f16")
    write_gguf(model, tmp_path / "model.gguf", "bf16")


def test_a_tokenizer_that_has_no_name_is_refused_before_all(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    path = model / "tokenizer.json"
    words = json.loads(path.read_text())
    for changed in ({"pre_tokenizer": {"type": "Whitespace"}}, {"model": {"type": "Unigram", "vocab": []}}):
        path.write_text(json.dumps(words | changed))
        with pytest.raises(ModelError, match="no GGUF file can be made"):
            refuse_unwritable(model)


def test_cuts_by_their_expressions_have_names(tmp_path: Path) -> None:
    expression = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    tail = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    words = {"model": model, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, tail]}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    assert WordsOf(tmp_path, 1).cut == "llama-bpe"


@given(
    theta=st.floats(5e3, 1e6),
    factor=st.integers(2, 64),
    original=st.sampled_from([1024, 4096, 8192, 32768]),
    size=st.sampled_from([64, 96, 128]),
)
def test_factors_are_those_of_transformers_and_are_read_back(theta: float, factor: int, original: int, size: int) -> None:
    rotation = {**LLAMA3, "rope_theta": theta, "factor": float(factor), "original_max_position_embeddings": original}
    config = LlamaConfig(
        hidden_size=4 * size, num_attention_heads=4, head_dim=size, rope_parameters=rotation, max_position_embeddings=1 << 17
    )
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    plain = 1 / torch.tensor(theta, dtype=torch.float64) ** (torch.arange(0, size, 2) / size)
    factors = llama3_factors(rotation, size)
    assert torch.allclose(plain / torch.from_numpy(factors).double(), stretched.double(), rtol=1e-4)
    found = rotation_of(factors, theta)
    if found is not None:  # None: no frequency lies between
        assert found == rotation


def test_a_file_whose_frequencies_are_changed_otherwise_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", rope_parameters=LLAMA3)
    write_gguf(model, tmp_path / "model.gguf")
    assert read_gguf_config(tmp_path / "model.gguf").rope_parameters == LLAMA3
    factors = next(each for each in GGUFReader(tmp_path / "model.gguf").tensors if each.name == FACTORS)
    content = bytearray((tmp_path / "model.gguf").read_bytes())
    other = np.array([1, 2, 3, 1, 5, 6, 7, 8], np.float32).tobytes()
    content[int(factors.data_offset) : int(factors.data_offset) + len(other)] = other
    (tmp_path / "other.gguf").write_bytes(content)
    with pytest.raises(ModelError, match="not those of Llama 3"):
        gguf_directory(tmp_path / "other.gguf", tmp_path / "cache")
