"""Weights in and out: equal to what transformers loads and saves, in every layout and dtype; bad files are named."""

import contextlib
import itertools
import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_models import DTYPES, import_all, save, values_of
from tiers import sampled
from tiny_architectures import CONFIGS, make_config, make_plain
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel

from headrace.model import Chain, Checkpoint, Exporter, import_unit, match_weights
from headrace.model.directory.importing import check_copies
from headrace.terms.errors import ExportFailed, ModelError, RunDirectoryError
from headrace.terms.options.optimizer import Optimizer

SAVED = ["llama", "llama-tied", "gpt2", "opt-projected", "gemma3", "falcon", "mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss"]


def assert_same_files(left: Path, right: Path) -> None:
    tensors = [{}, {}]
    for found, directory in zip(tensors, (left, right), strict=True):
        for file in sorted(directory.glob("*.safetensors")):
            found.update(load_file(file))
    assert set(tensors[0]) == set(tensors[1])
    for name, tensor in tensors[0].items():
        assert tensor.dtype == tensors[1][name].dtype, name
        assert torch.equal(tensor, tensors[1][name]), name


@pytest.mark.parametrize(
    ("name", "dtype"),
    sampled(
        itertools.product(SAVED, DTYPES),
        [
            ("llama-tied", "bfloat16"),
            ("gpt2", "float16"),
            ("gemma3", "float32"),
            ("mixtral", "bfloat16"),
            ("gpt-oss", "float16"),
        ],
    ),
)
def test_import_equals_from_pretrained_and_export_equals_the_original(tmp_path: Path, name: str, dtype: str) -> None:
    directory, _ = save(tmp_path, name, dtype)
    checkpoint, chain, planes, exact = import_all(directory, "bfloat16")
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for key, value in values_of(chain, planes).items():
        assert torch.equal(value, stock.get_parameter(key).detach()), key
    assert all(exact) == (dtype == "bfloat16")
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    for key, buffer in chain.model.named_buffers():
        assert torch.equal(buffer, stock.get_buffer(key)), key
    out = Exporter(checkpoint, chain, tmp_path / "out", lambda unit: planes[unit]).write()
    assert_same_files(directory, out)
    assert (out / "config.json").read_bytes() == (directory / "config.json").read_bytes()


def test_of_one_file_and_the_shards_of_an_older_save_the_one_counts_as_in_transformers(tmp_path: Path) -> None:
    directory, _ = save(tmp_path, "llama", "float32")
    older = {name: tensor + 1 for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(older, directory / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    index = {"weight_map": dict.fromkeys(older, "model-00001-of-00001.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    _, chain, planes, _ = import_all(directory, "float32")
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for key, value in values_of(chain, planes).items():
        assert torch.equal(value, stock.get_parameter(key).detach()), key


@pytest.mark.parametrize(
    ("name", "compute_dtype"),
    sampled(
        itertools.product(["mixtral", "qwen3-moe", "llama-tied"], ["float32", "float16"]),
        [("mixtral", "float32"), ("llama-tied", "float16")],
    ),
)
def test_other_compute_dtypes(tmp_path: Path, name: str, compute_dtype: str) -> None:
    directory, _ = save(tmp_path, name, "float32")
    checkpoint, chain, planes, _ = import_all(directory, compute_dtype)
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for key, value in values_of(chain, planes).items():
        assert torch.equal(value, stock.get_parameter(key).detach()), key
    if compute_dtype == "float16":
        assert all(np.array_equal(weight, master.astype(np.float16)) for weight, master in planes)
    out = Exporter(checkpoint, chain, tmp_path / "out", lambda unit: planes[unit]).write()
    assert_same_files(directory, out)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_packed_experts_come_back_packed(tmp_path: Path, name: str) -> None:
    directory, _ = save(tmp_path, name, "bfloat16")
    stored = set(Checkpoint.open(directory).tensors)
    assert any(".experts.0." in key for key in stored)  # what save_pretrained writes: one tensor per expert
    stock = AutoModelForCausalLM.from_pretrained(directory)
    packed = {key: value.detach().contiguous() for key, value in stock.named_parameters()}
    assert any(key.endswith("experts.gate_up_proj") for key in packed)
    save_file(packed, directory / "model.safetensors", metadata={"format": "pt"})
    checkpoint, chain, planes, _ = import_all(directory, "bfloat16")
    for key, value in values_of(chain, planes).items():
        assert torch.equal(value, packed[key].float()), key
    out = Exporter(checkpoint, chain, tmp_path / "out", lambda unit: planes[unit]).write()
    assert_same_files(directory, out)


def test_export_of_trained_weights_loads_with_transformers(tmp_path: Path) -> None:
    directory, _ = save(tmp_path, "mixtral", "bfloat16")
    checkpoint, chain, planes, _ = import_all(directory, "bfloat16")
    for weight, _ in planes:
        weight[weight != 0] ^= 1  # "train": flip the last bit of every weight
    out = Exporter(checkpoint, chain, tmp_path / "out", lambda unit: planes[unit]).write()
    trained = AutoModelForCausalLM.from_pretrained(out)
    for layout, (weight, _) in zip(chain.layouts, planes, strict=True):
        for spec in layout.parameters:
            bits = torch.from_numpy(weight[spec.offset : spec.offset + spec.num_elements].view(np.int16).reshape(spec.shape))
            assert torch.equal(trained.get_parameter(spec.name).detach(), bits.view(torch.bfloat16)), spec.name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_operations_beyond_placing(tmp_path: Path, dtype: str) -> None:
    """A family whose stored tensors transformers joins on loading takes the general path, there and back."""
    config = CONFIG_MAPPING["olmo_hybrid"](
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=4,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        pad_token_id=0,
        eos_token_id=1,
    )
    directory = tmp_path / "model"
    make_plain(config, DTYPES[dtype]).save_pretrained(directory)
    checkpoint, chain, planes, _ = import_all(directory, "bfloat16")
    assert chain.attach(checkpoint).conversions
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for key, value in values_of(chain, planes).items():
        assert torch.equal(value, stock.get_parameter(key).detach()), key
    out = Exporter(checkpoint, chain, tmp_path / "out", lambda unit: planes[unit]).write()
    assert_same_files(directory, out)


@pytest.mark.wide
@pytest.mark.parametrize("dtype", sampled(["bfloat16", "float32"], ["bfloat16"]))
def test_memory_is_bounded_by_the_unit(tmp_path: Path, dtype: str) -> None:
    config = CONFIG_MAPPING["llama"](**{**CONFIGS["llama"][1], "vocab_size": 600_000, "tie_word_embeddings": True})
    AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).save_pretrained(tmp_path / "model")
    checkpoint = Checkpoint.open(tmp_path / "model")
    chain = Chain.from_config(checkpoint.config, "bfloat16", Optimizer())
    weights, layout = chain.attach(checkpoint), chain.layouts[0]
    planes = np.empty(layout.num_elements, np.uint16), np.empty(layout.num_elements, np.int16)
    others = [(np.zeros(unit.num_elements, np.uint16), np.zeros(unit.num_elements, np.int16)) for unit in chain.layouts[1:]]
    exporter = Exporter(checkpoint, chain, tmp_path / "out", lambda unit: [planes, *others][unit])
    tracemalloc.start()
    try:
        import_unit(weights, layout, *planes)
        exporter.write()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert layout.num_elements * 4 > 70e6
    assert peak_bytes < 40e6


def test_base_model_checkpoints_load(tmp_path: Path) -> None:
    """Saved without the head class: no `model.` or `transformer.` prefix, and a tied head."""
    for name in ("llama-tied", "gpt2"):
        directory = tmp_path / name
        config = make_config(CONFIGS[name])
        full = make_plain(config)
        full.base_model.save_pretrained(directory)
        _, chain, planes, _ = import_all(directory, "float32")
        for key, value in values_of(chain, planes).items():
            assert torch.equal(value, full.get_parameter(key).detach()), key


def test_untied_base_model_lacks_its_head(tmp_path: Path) -> None:
    make_plain(make_config(CONFIGS["llama"])).base_model.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        import_all(tmp_path / "model", "float32")


def test_tied_head_stored_twice(tmp_path: Path) -> None:
    directory, _ = save(tmp_path, "llama-tied", "float32")
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    checkpoint, chain, planes, _ = import_all(directory, "bfloat16")
    out = Exporter(checkpoint, chain, tmp_path / "out", lambda unit: planes[unit]).write()
    assert_same_files(directory, out)
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint.open(directory)
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        check_copies(match_weights(checkpoint, Chain.from_config(checkpoint.config, "bfloat16", Optimizer()).model))


def test_many_shards_in_and_out(tmp_path: Path) -> None:
    directory, _ = save(tmp_path, "qwen3-moe", "bfloat16", max_shard_size="30KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    checkpoint, chain, planes, _ = import_all(directory, "bfloat16")
    asked: list[int] = []
    exporter = Exporter(checkpoint, chain, tmp_path / "out", lambda unit: asked.append(unit) or planes[unit], shard_bytes=20000)
    out = exporter.write()
    assert asked == list(range(len(chain.layouts)))
    assert_same_files(directory, out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(checkpoint.tensors)
    assert index["metadata"]["total_size"] == checkpoint.num_bytes
    assert AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16) is not None


def test_unused_tensors_and_other_files_are_kept(tmp_path: Path) -> None:
    directory, _ = save(tmp_path, "llama", "float32")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.arange(4.0)
    tensors["counts"] = torch.arange(5)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "pytorch_model.bin").write_bytes(b"old")
    checkpoint, chain, planes, _ = import_all(directory, "bfloat16")
    out = Exporter(checkpoint, chain, tmp_path / "out", lambda unit: planes[unit]).write()
    assert_same_files(directory, out)
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (out / "tokenizer.json").exists()
    assert not (out / "pytorch_model.bin").exists()


def test_padding_is_cleared(tmp_path: Path) -> None:
    directory, _ = save(tmp_path, "llama", "float32")
    _, chain, planes, _ = import_all(directory, "bfloat16")
    for layout, (weight, master) in zip(chain.layouts, planes, strict=True):
        used = np.zeros(layout.num_elements, bool)
        for spec in layout.parameters:
            used[spec.offset : spec.offset + spec.num_elements] = True
        assert not weight[~used].any()
        assert not master[~used].any()


def test_failed_export_leaves_nothing(tmp_path: Path) -> None:
    directory, _ = save(tmp_path)
    checkpoint, chain, planes, _ = import_all(directory, "bfloat16")

    def read_unit(unit: int) -> Any:
        if unit == 2:
            raise OSError(5, "unreadable")
        return planes[unit]

    with pytest.raises(OSError, match="unreadable"):
        Exporter(checkpoint, chain, tmp_path / "out", read_unit).write()
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_export_refuses_a_full_directory_and_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = save(tmp_path)
    checkpoint, chain, planes, _ = import_all(directory, "bfloat16")
    with pytest.raises(RunDirectoryError, match="not empty"):
        Exporter(checkpoint, chain, directory, lambda unit: planes[unit]).write()
    (tmp_path / "empty").mkdir()
    Exporter(checkpoint, chain, tmp_path / "empty", lambda unit: planes[unit]).write()
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free._replace(free=1000))
    with pytest.raises(ExportFailed, match="free are 1000"):
        Exporter(checkpoint, chain, tmp_path / "out", lambda unit: planes[unit]).write()


def test_tables_of_integers_among_the_buffers_come_from_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V4 looks up in one which expert a token goes to; a checkpoint's need not be what the architecture makes."""
    made = LlamaModel.__init__

    def with_a_table(self: Any, config: Any) -> None:
        made(self, config)
        self.register_buffer("table", torch.zeros(4, dtype=torch.int64))

    monkeypatch.setattr(LlamaModel, "__init__", with_a_table)
    directory, _ = save(tmp_path, "llama")
    tensors, table = load_file(directory / "model.safetensors"), torch.tensor([3, 1, 2, 0])
    chain = Chain.from_config(Checkpoint.open(directory).config, "bfloat16", Optimizer())
    cases = ((table, ""), (table.int(), ""), (table + 2**40, "does not fit"), (table.float(), "an integer dtype"))
    for stored, words in cases:
        save_file({**tensors, "model.table": stored}, directory / "model.safetensors", metadata={"format": "pt"})
        if words == "does not fit":
            chain.model.model.table = torch.zeros(4, dtype=torch.int32)
        with pytest.raises(ModelError, match=words) if words else contextlib.nullcontext():
            chain.attach(Checkpoint.open(directory))
            assert torch.equal(chain.model.model.table, table)
