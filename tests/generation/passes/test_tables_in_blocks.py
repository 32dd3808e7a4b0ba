"""Rows of tables in blocks that stay in the file: tokens and logits have the bits of transformers' `generate`.

Run: pytest tests/generation/passes/test_tables_in_blocks.py
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_models import save_with_tables
from some_prompts import GREEDY, prompts
from tiers import sampled

from headrace.generate.passes.asked import plan_generation
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import SeatRows
from headrace.model.parts.stored_rows import rows_within
from headrace.plan.clock.machine_profiles import load_profile
from headrace.terms.errors import StorageError
from headrace.terms.options.budget import Budget
from headrace.terms.options.generate_options import GenerateOptions

NEW_TOKENS = 8
SETTINGS = GREEDY | {"max_new_tokens": NEW_TOKENS, "eos_token_id": None}


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every table be large."""
    monkeypatch.setattr("headrace.model.by_rows.block_tables.LEAST_BYTES", 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tables(tmp_path_factory.mktemp("tables"), torch.float32)


@pytest.mark.parametrize("device", sampled([None, "64MiB"]))
def test_bits_are_those_of_the_whole_table(device: str | None, model: Path, stock: Callable[..., Any]) -> None:
    """Eight greedy tokens of two rows, whose n-grams reach from one pass into the next."""
    with Generator.open(model, Budget(host="4GiB", device=device), compute_dtype="float32") as generator:
        rows = prompts(2)
        plan = generator.prepare(2, 12, NEW_TOKENS)
        assert [each.unit for each in plan.costs.first.tables] == [1, 2]
        assert [each.ids for each in plan.costs.next.tables] == [16 * plan.rows] * 2
        generator.use(replace(plan, rows=2, seats=1, host_slots=2, device_slots=2, prefetch=1))
        whole = generator.model.settings(12, None, SETTINGS)
        (done,) = generator.run([SeatRows(0, tuple(map(tuple, rows)), 40, whole)])
        read = [each.bytes_read for block in generator.model.chain.runner.blocks for each in rows_within(block)]
    expected = stock(model, "float32", rows, 40, SETTINGS)
    assert torch.equal(done.raw.sequences, expected.sequences)
    assert all(torch.equal(one, other) for one, other in zip(done.raw.logits, expected.logits, strict=True))
    assert all(0 < each <= 2 * (12 + NEW_TOKENS) * 16 * 4 * 4 for each in read)


@pytest.mark.wide
def test_a_table_in_its_file_is_in_no_cache(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What modules keep from pass to pass counts as a block's cache; a table that stands elsewhere is not kept."""
    machine = load_profile("rtx4090-4ssd")
    asked: dict[str, Any] = {"prompts": 2, "prompt_length": 12, "new_tokens": 4, "here": False}
    options = GenerateOptions.of({"host_memory": "8GiB", "device_memory": "2GiB"})
    by_rows = plan_generation(str(model), options, machine, **asked)
    monkeypatch.setattr("headrace.model.by_rows.block_tables.LEAST_BYTES", 1 << 60)
    whole = plan_generation(str(model), options, machine, **asked)
    assert by_rows.costs.cache_bytes == whole.costs.cache_bytes
    assert by_rows.units[1].num_elements < whole.units[1].num_elements
    assert by_rows.results.peak_bytes["host"]["rows of tables in blocks"] > 0
    notes = [note for note in by_rows.results.notes if "stays in the model's files" in note]
    assert len(notes) == 2, "one for each table"
    assert not any("stays in the model's files" in note for note in whole.results.notes)


@pytest.mark.wide
def test_a_file_that_was_cut_is_named(tmp_path: Path) -> None:
    path = save_with_tables(tmp_path / "model", torch.float32)
    with Generator.open(path, Budget(host="4GiB")) as generator:
        (rows, *_) = rows_within(generator.model.chain.runner.blocks[0])
        for shard in path.glob("*.safetensors"):
            shard.open("r+b").truncate(4096)
        with pytest.raises(StorageError, match=r"row \d+ of .*ngram_embedding.shard_\d+.weight ends early"):
            rows(torch.tensor([0, 9, 600]))
