"""Rows of a table in a block, read in the model's files as the block asks for them, give the bits of the whole table.

Run: pytest tests/equivalence/test_block_tables.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, ROWS, SPLIT, batch_of, packed
from saved_models import save_with_tables, touched
from short_run import short_run
from tiers import sampled
from transformers import AutoModelForCausalLM

import headrace
from headrace.engine.trainer import Engine
from headrace.model.parts.stored_rows import rows_within
from headrace.plan.value.plan import Plan
from headrace.terms.errors import RunDirectoryError

STEPS = 3
VOCABULARY = 176
WIDTH = 4


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return what says whether all tables are large, or none."""

    def say(found: bool) -> None:
        monkeypatch.setattr("headrace.model.by_rows.block_tables.LEAST_BYTES", 0 if found else 1 << 60)

    return say


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen4-Exp in bfloat16, whose two tables of n-grams lie in several tensors each."""
    return save_with_tables(tmp_path_factory.mktemp("tables"), torch.bfloat16)


CASES: dict[str, dict[str, Any]] = {
    "adapters": {},
    "plain": {"interpreter": "plain"},
    "a device": {"device_memory": "1GiB"},
    "a device, plain, clipped": {"device_memory": "1GiB", "interpreter": "plain", "max_grad_norm": 0.1},
    "a tree": {"gradient_sum": "tree"},
    "computed in float32": {"compute_dtype": "float32"},
}


def adapted(model: Path, run: Path, batches: list[dict[str, torch.Tensor]], **options: Any) -> tuple[Any, list[int]]:
    """Return losses and adapters of a run over `batches`, and the bytes that were read of each table by rows."""
    read = list[int]()

    def look(engine: Engine) -> None:
        read.extend(rows.bytes_read for block in engine.chain.runner.blocks for rows in rows_within(block))
        assert engine.plan is not None
        assert len(engine.plan.results.tables) == len(read)

    given: dict[str, Any] = {"adapter": "lora:rank=4", "compute_dtype": "bfloat16", "adjust": SPLIT}
    return short_run(model, run, batches, inspect=look, **given | options), read


def life(model: Path, folder: Path) -> list[Any]:
    """Return what a run says that trains, evaluates, is closed, resumed and finished; and the adapters that it saves."""
    batches = [batch_of(ROWS, LENGTH, seed, vocabulary=VOCABULARY) for seed in range(3)]
    lengths: dict[str, Any] = {"tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH, "learning_rate": 1e-2}
    options = headrace.Options(output=folder / "run", adapter="lora:rank=4", host_memory="4GiB", **lengths)
    with Engine.open(model, options) as engine:
        said: list[Any] = [engine.step(batches[0]).loss, engine.evaluate(batches[2]).loss]
    with Engine.resume(folder / "run") as engine:
        said += [engine.step(batches[1]).loss, engine.evaluate(batches[2]).loss]
        engine.save_pretrained(folder / "final")
    return [*said, (folder / "final" / "adapter_model.safetensors").read_bytes()]


@pytest.mark.wide
def test_a_run_goes_on_where_it_was(model: Path, large: Callable[[bool], None], tmp_path: Path) -> None:
    """A resumed run reads rows if it began so, whatever counts as large by then; its files may not have changed."""
    large(False)
    expected = life(model, tmp_path / "whole")
    large(True)
    assert life(model, tmp_path / "rows") == expected
    large(False)
    with Engine.resume(tmp_path / "rows" / "run") as engine:
        assert sum(len(rows_within(block)) for block in engine.chain.runner.blocks) == 2
        assert engine.plan is not None
        assert Plan.from_json(json.loads(json.dumps(engine.plan.to_json()))) == engine.plan
    with touched(model), pytest.raises(RunDirectoryError, match="changed since the run began"):
        Engine.resume(tmp_path / "rows" / "run")


def distinct_ids(model: Path, batches: list[torch.Tensor]) -> list[int]:
    """Return how many rows of each table transformers' own model asks for, each counted once a batch."""
    stock, counts = AutoModelForCausalLM.from_pretrained(model), dict[str, int]()
    for name, module in stock.named_modules():
        if name.endswith("ngram_embedding"):
            counts[name] = 0

            def count(_: Any, args: Any, name: str = name) -> None:
                counts[name] += len(args[0].unique())

            module.register_forward_pre_hook(count)
    with torch.no_grad():
        for ids in batches:
            stock(ids)
    return list(counts.values())


def same(one: Any, other: Any) -> bool:
    """Return whether two runs have the same losses and weights, bit by bit."""
    return one[0] == other[0] and one[1].keys() == other[1].keys() and all(map(torch.equal, one[1].values(), other[1].values()))


@pytest.mark.wide
@pytest.mark.parametrize("case", sampled(CASES, ("adapters", "a device")))
def test_rows_train_as_the_whole_table(case: str, model: Path, large: Callable[[bool], None], tmp_path: Path) -> None:
    """Three steps of LoRA, each of three micro-batches: forward and recompute read the rows that they ask for, each once."""
    batches = [batch_of(ROWS, LENGTH, seed, vocabulary=VOCABULARY) for seed in range(STEPS)]
    large(False)
    expected, read = adapted(model, tmp_path / "whole", batches, **CASES[case])
    assert read == []
    large(True)
    found, read = adapted(model, tmp_path / "rows", batches, **CASES[case])
    assert same(found, expected)
    asked = distinct_ids(model, [part for batch in batches for part in batch["input_ids"].split(2)])
    assert read == [2 * count * WIDTH * 2 for count in asked]


@pytest.mark.wide
@pytest.mark.parametrize("kind", sampled(("padded", "packed"), ("packed",)))
def test_rows_of_several_samples(kind: str, model: Path, large: Callable[[bool], None], tmp_path: Path) -> None:
    """Samples of a packed row run by themselves, and each asks for rows of its own n-grams."""
    lengths, rows = (20, 12, 32, 9, 23, 16), ((0, 1), (2,), (3, 4), (5,))
    whole = [batch_of(ROWS, LENGTH, seed, vocabulary=VOCABULARY, padded=kind == "padded") for seed in range(STEPS)]
    batches = whole if kind == "padded" else [packed(batch, lengths, rows) for batch in whole]
    runs = []
    for by_rows in (False, True):
        large(by_rows)
        runs.append(adapted(model, tmp_path / str(by_rows), batches, adjust=None)[0])
    assert same(*runs)
