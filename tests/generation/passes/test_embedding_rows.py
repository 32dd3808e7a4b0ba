"""Rows of an embedding that stays in the file: those of the whole table, with the bits of transformers' `generate`.

Run: pytest tests/generation/passes/test_embedding_rows.py
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from some_prompts import GREEDY, prompts
from tiers import sampled
from transformers import LlamaConfig

from headrace.generate.passes.asked import plan_generation
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import SeatRows
from headrace.model import Chain, Checkpoint
from headrace.model.by_rows.embedding_rows import has_rows, read_embedding_rows
from headrace.model.stored.safetensors_file import read_header
from headrace.plan.clock.machine_profiles import load_profile
from headrace.terms.errors import StorageError
from headrace.terms.options.budget import Budget
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.options.optimizer import Optimizer

UNTIED = ("llama", "qwen3", "phi3", "mixtral", "deepseek-v3", "gpt-neox")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every model be more than the memory."""
    monkeypatch.setattr("headrace.generate.plan.block_tables.is_short", lambda chain, place, budget: True)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", sampled(UNTIED, ("llama", "mixtral")))
@pytest.mark.parametrize("device", [None, "64MiB"])
def test_bits_are_those_of_the_whole_table(
    name: str, device: str | None, directory_of: Callable[..., Path], stock: Callable[..., Any]
) -> None:
    directory = directory_of(name)
    with Generator.open(directory, Budget(host="4GiB", device=device), compute_dtype="float32") as generator:
        assert any("rows of the embedding are read from the file" in note for note in generator.model.notes)
        rows = prompts(2)
        plan = generator.prepare(2, 12, 6)
        assert plan.units[0].num_elements < generator.model.chain.vocabulary
        generator.use(replace(plan, rows=2, seats=1, host_slots=2, device_slots=2, prefetch=1))
        whole = generator.model.settings(12, None, GREEDY)
        (done,) = generator.run([SeatRows(0, tuple(map(tuple, rows)), 40, whole)])
    expected = stock(directory, "float32", rows, 40, GREEDY)
    assert torch.equal(done.raw.sequences, expected.sequences)
    assert all(torch.equal(one, other) for one, other in zip(done.raw.logits, expected.logits, strict=True))


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_rows_are_copies_rounded_as_the_table(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    stored, dtype = (
        data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        data.draw(st.sampled_from(["bfloat16", "float32"])),
    )
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("rows")
    config.save_pretrained(folder)
    chain = Chain.from_config(config, dtype, Optimizer())
    shapes = {name: parameter.shape for name, parameter in chain.model.named_parameters()}
    tensors = {name: torch.randn(shape).to(stored) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    weights = chain.attach(Checkpoint.open(folder))
    assert has_rows(chain, weights)
    read_embedding_rows(chain, weights)
    ids = torch.tensor(data.draw(st.lists(st.lists(st.integers(0, 499), min_size=40, max_size=40), min_size=1, max_size=9)))
    table = tensors["model.embed_tokens.weight"].to(getattr(torch, dtype))
    assert torch.equal(chain.model.get_input_embeddings()(ids), torch.nn.functional.embedding(ids, table))


@pytest.mark.usefixtures("short")
def test_tied_and_scaled_embeddings_stay_whole(directory_of: Callable[..., Path]) -> None:
    for name in ("llama-tied", "gemma3"):
        with Generator.open(directory_of(name)) as generator:
            assert not any("rows of the embedding" in note for note in generator.model.notes)


@pytest.mark.usefixtures("short")
def test_a_file_that_was_cut_is_named(directory_of: Callable[..., Path], tmp_path: Path) -> None:
    source = directory_of("llama")
    tensors: dict[str, torch.Tensor] = {}
    for path in source.glob("*.safetensors"):
        tensors |= load_file(path)
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    table = read_header(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    with Generator.open(tmp_path) as generator:
        (tmp_path / "model.safetensors").open("r+b").truncate(table.offset + 40)
        with pytest.raises(StorageError, match=r"row \d+ of model.embed_tokens.weight"):
            generator.model.chain.model.get_input_embeddings()(torch.tensor([0, 9]))


@pytest.mark.wide
def test_a_plan_leaves_it_in_the_file_where_memory_is_short(tmp_path: Path) -> None:
    LlamaConfig(hidden_size=1024, num_hidden_layers=16, vocab_size=64_000, dtype="bfloat16").save_pretrained(tmp_path)
    machine, how = load_profile("rtx4090-4ssd"), {"prompts": 1, "prompt_length": 64, "new_tokens": 8, "here": False}
    few, many = (
        plan_generation(str(tmp_path), GenerateOptions.of({"host_memory": host, "device_memory": "700MiB"}), machine, **how)
        for host in ("500MiB", "8GiB")
    )
    assert "rows of the embedding are read from the file as tokens ask for them: 125 MiB stay there" in few.explain()
    assert "rows of the embedding" not in many.explain()
    assert many.units[0].num_elements - few.units[0].num_elements == 64_000 * 1024
