"""Rows of a frozen embedding that a step reads in the model's files give the bits of the whole table, wherever things live."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, ROWS, SPLIT, batch_of, train
from plan_changes import changed
from saved_models import touched
from tiers import sampled

import headrace
from headrace.engine.seams import seams_of
from headrace.engine.trainer import Engine
from headrace.model.parts.stored_rows import StoredRows
from headrace.plan.value.plan import Plan
from headrace.terms.embedding_rows import EmbeddingRows
from headrace.terms.errors import ConfigError, PlanInfeasible, RunDirectoryError

STEPS = 2
WIDTH = 64


def rows(stored: str = "bfloat16", computed: str = "bfloat16") -> dict[str, Any]:
    """Return the change of a plan that reads rows of the tiny embedding."""
    sizes = {"bfloat16": 2, "float16": 2, "float32": 4}
    figures = EmbeddingRows(rows=384, stored_bytes=WIDTH * sizes[stored], computed_bytes=WIDTH * sizes[computed])
    return {"embedding": figures}


def runs(path: Path, tmp_path: Path, change: dict[str, Any], **options: Any) -> None:
    """Assert that a run that reads rows has the losses and weights of one with the whole table, and that it reads rows."""
    read: list[int] = []

    def look(engine: Engine) -> None:
        reader = engine.chain.model.get_input_embeddings()
        assert isinstance(reader, StoredRows)
        read.append(reader.bytes_read)
        assert engine._steps is not None
        assert engine._steps.parts.buffers.residents[0].numel() == 0

    expected = train(path, tmp_path / "whole", steps=STEPS, adjust=SPLIT, **options)
    found = train(path, tmp_path / "rows", steps=STEPS, adjust=SPLIT | change, inspect=look, **options)
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])
    # Each of a step's micro-batches reads each row that its tokens name once, and the loss reads none.
    distinct = [len(part.unique()) for seed in range(STEPS) for part in batch_of(ROWS, LENGTH, seed)["input_ids"].split(2)]
    assert read == [sum(distinct) * change["embedding"].stored_bytes]


CASES: dict[str, dict[str, Any]] = {
    "adapters": {"adapter": "lora:rank=4"},
    "adapters, plain": {"adapter": "lora:rank=4", "interpreter": "plain"},
    "a device": {"adapter": "lora:rank=4", "device_memory": "1GiB"},
    "a device, plain, clipped": {
        "adapter": "lora:rank=4",
        "device_memory": "1GiB",
        "interpreter": "plain",
        "max_grad_norm": 0.1,
    },
    "matrices of blocks": {"train": "matrices"},
    "matrices of blocks, a device": {"train": "matrices", "device_memory": "1GiB"},
    "a tree": {"adapter": "lora:rank=4", "gradient_sum": "tree"},
}


@pytest.mark.parametrize("case", sampled(CASES, ("a device", "matrices of blocks")))
@pytest.mark.parametrize("name", sampled(("llama", "mixtral-aux", "deepseek", "gpt-oss"), ("llama",)))
def test_rows_train_as_the_whole_table(name: str, case: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    runs(model_dir(name, "bfloat16"), tmp_path, rows(), compute_dtype="bfloat16", **CASES[case])


@pytest.mark.wide
@pytest.mark.parametrize("stored", ["float16", "float32", pytest.param("bfloat16", marks=pytest.mark.deep)])
def test_rows_are_rounded_as_the_table_is(stored: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Of float16 an eighth of all numbers is halfway between two of bfloat16."""
    computed = "float32" if stored == "bfloat16" else "bfloat16"
    runs(model_dir("llama", stored), tmp_path, rows(stored, computed), compute_dtype=computed, adapter="lora:rank=4")


@pytest.mark.deep
def test_experts_that_come_singly_meet_rows(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    adapter = "lora:rank=4,target_modules=o_proj+experts"
    seams = replace(seams_of(headrace.Options(adapter=adapter)), parted=True)
    change = rows() | {"experts": lambda plan: replace(plan.experts, together=2, in_round=1)}
    more: dict[str, Any] = {"adapter": adapter, "seams": seams, "device_memory": "1GiB", "compute_dtype": "bfloat16"}
    runs(model_dir("mixtral-aux", "bfloat16"), tmp_path, change, **more)


def life(
    path: Path, folder: Path, adjust: Callable[[Plan], Plan], device: str | None = None
) -> tuple[Plan, list[Any], list[bytes]]:
    """Return the plan of a run that trains an adapter, evaluates, is kept, closed and resumed; what it said, what it saved."""
    batches = [batch_of(ROWS, LENGTH, seed) for seed in range(3)]
    more: dict[str, Any] = {"tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH, "learning_rate": 1e-2}
    options = headrace.Options(output=folder / "run", adapter="lora:rank=4", host_memory="4GiB", device_memory=device, **more)
    with Engine.open(path, options, adjust_plan=adjust) as engine:
        said: list[Any] = [engine.step(batches[0]).loss, engine.evaluate(batches[2]).loss]
        engine.begin_saving(folder / "kept").wait()
    with Engine.resume(folder / "run") as engine:
        assert engine.plan is not None
        plan = engine.plan
        said += [engine.step(batches[1]).loss, engine.evaluate(batches[2]).loss]
        said.append(engine.next_logits({"input_ids": batches[2]["input_ids"]}).tolist())
        engine.save_pretrained(folder / "final")
    return plan, said, [(folder / each / "adapter_model.safetensors").read_bytes() for each in ("kept", "final")]


@pytest.mark.wide
def test_a_run_goes_on_where_it_was_and_evaluates_as_ever(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Evaluated, kept, closed, resumed: as a run with the whole table. Its file may not change meanwhile."""
    path = model_dir("llama", "bfloat16")
    whole, *expected = life(path, tmp_path / "whole", lambda plan: plan)
    by_rows, *found = life(path, tmp_path / "rows", lambda plan: changed(plan, **rows()))
    assert whole.embedding is None
    assert by_rows.embedding is not None
    assert found == expected
    with touched(path), pytest.raises(RunDirectoryError, match="changed since the run began"):
        Engine.resume(tmp_path / "rows" / "run")


def opened(path: Path, output: Path, device: int | str, plan: Plan | None = None, **options: Any) -> Plan:
    """Return the plan of a run that did a step."""
    given: dict[str, Any] = {"host_memory": "4GiB", "tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH}
    with Engine.open(path, headrace.Options(output=output, device_memory=device, **given | options), plan=plan) as engine:
        assert engine.plan is not None
        found = engine.plan
        engine.step(batch_of(ROWS, LENGTH, 0))
        assert isinstance(engine.chain.model.get_input_embeddings(), StoredRows) == (found.embedding is not None)
    return found


def tightest(path: Path, tmp_path: Path, **options: Any) -> Plan:
    """Return the plan of a run with as little device memory as it can have."""
    with pytest.raises(PlanInfeasible) as refusal:
        opened(path, tmp_path / "none", 1, **options)
    assert refusal.value.tier == "device"
    return opened(path, tmp_path / "tight", refusal.value.needed_bytes, **options)


@pytest.mark.wide
@pytest.mark.searched
def test_rows_are_read_where_the_device_has_no_room_for_the_table(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("llama", "bfloat16")
    roomy = opened(path, tmp_path / "roomy", "1GiB", adapter="lora:rank=4")
    assert roomy.embedding is None
    tight = tightest(path, tmp_path, adapter="lora:rank=4")
    assert tight.embedding == rows()["embedding"]
    assert any("rows of the embedding are read from the file" in note for note in tight.results.notes)
    assert tight.results.peak_bytes["host"]["rows of the embedding"] > 0
    stored = Plan.from_json(json.loads(json.dumps(tight.to_json())))
    assert stored == tight
    assert opened(path, tmp_path / "given", "1GiB", stored, adapter="lora:rank=4").embedding == tight.embedding


@pytest.mark.wide
@pytest.mark.searched
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-tied", {"adapter": "lora:rank=4"}),  # the head is the table
        pytest.param("gemma3", {"adapter": "lora:rank=4"}, marks=pytest.mark.deep),  # its own module scales what it reads
        pytest.param("llama", {}, marks=pytest.mark.deep),  # it is trained
    ],
)
def test_a_table_that_more_than_reads_need_stays_whole(
    name: str, options: dict[str, Any], model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path = model_dir(name, "bfloat16")
    plan = tightest(path, tmp_path, **options)
    assert plan.embedding is None
    with pytest.raises(ConfigError, match="rows of the embedding are read one by one in the plan"):
        opened(path, tmp_path / "given", "1GiB", changed(plan, **rows()), **options)
