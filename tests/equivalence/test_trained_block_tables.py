"""Tables in blocks that are trained by rows have the bits of blocks that are updated whole.

Run: pytest tests/equivalence/test_trained_block_tables.py
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from life_by_rows import assert_lives_are_alike
from plain import LENGTH, ROWS, SPLIT, PlainTrainer, batch_of, check_close, packed
from saved_models import save_with_tables, touched
from short_run import short_run
from tiers import sampled

import headrace
from headrace.engine.block_tables import Tables
from headrace.engine.trainer import Engine
from headrace.model.by_rows.learned_rows import LearnedRows
from headrace.model.parts.stored_rows import rows_within
from headrace.plan.value.plan import Plan
from headrace.terms.errors import PlanInfeasible, RunDirectoryError

pytestmark = pytest.mark.wide  # some 25 s a case; the seam has its usual tests where the embedding is trained by rows
STEPS = 4
VOCABULARY = 176
TABLES = [f"model.layers.{layer}.ple.ple_embedding.ngram_embedding" for layer in (0, 1)]
LENGTHS: dict[str, Any] = {"host_memory": "4GiB", "tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH}
CASES: dict[str, dict[str, Any]] = {
    "clipped": {"max_grad_norm": 0.1, "compute_dtype": "float32"},
    "bfloat16, clipped": {"max_grad_norm": 0.1},
    "unclipped": {"max_grad_norm": None},
    "float16, a schedule": {"compute_dtype": "float16", "lr_schedule": "cosine", "max_steps": 9, "max_grad_norm": 1.0},
    "a device, clipped": {"device_memory": "1GiB", "max_grad_norm": 0.1},
    "a device, plain": {"device_memory": "1GiB", "interpreter": "plain"},
    "plain, clipped": {"interpreter": "plain", "max_grad_norm": 0.1},
    "the embedding, too": {"gradient": "rows", "max_grad_norm": 0.1},
    "seldom commits": {"checkpoint_every": 3},
    "sgd": {"optimizer": "sgd:momentum=0.9", "max_grad_norm": 0.1},
    "lomo, clipped steps run twice": {"optimizer": "lomo", "max_grad_norm": 0.1},
    "float32 sums": {"optimizer": "lion", "gradient_dtype": "float32", "max_grad_norm": 0.1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen4-Exp in bfloat16, two of whose blocks have a table of n-grams in several tensors."""
    return save_with_tables(tmp_path_factory.mktemp("tables"), torch.bfloat16)


def batches_of(count: int) -> list[dict[str, torch.Tensor]]:
    return [batch_of(ROWS, LENGTH, seed, vocabulary=VOCABULARY) for seed in range(count)]


def learned(engine: Engine) -> list[LearnedRows]:
    """Return what stands in the places of tables of blocks."""
    return [rows for block in engine.chain.runner.blocks for rows in rows_within(block) if isinstance(rows, LearnedRows)]


def trained(model: Path, run: Path, batches: list[dict[str, torch.Tensor]], **options: Any) -> Any:
    more = {"learning_rate": 1e-2, "weight_decay": 0.1, "compute_dtype": "bfloat16", "adjust": SPLIT, **options}
    return short_run(model, run, batches, **more)


@pytest.mark.parametrize("case", sampled(CASES, ("clipped", "bfloat16, clipped")))
def test_rows_have_the_bits_of_dense_updates(case: str, model: Path, tmp_path: Path) -> None:
    """The norm that clips is one of the block with its table; rows that no step reads decay, and keep their moments."""
    batches, counts = batches_of(STEPS), list[int]()
    expected, wanted = trained(model, tmp_path / "dense", batches, **CASES[case] | {"gradient": "dense"})
    by_rows = {"gradient": "rows:tables=blocks"} | CASES[case]
    losses, found = trained(
        model, tmp_path / "rows", batches, inspect=lambda engine: counts.append(len(learned(engine))), **by_rows
    )
    assert counts == [2]
    assert losses == expected
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("kind", sampled(("padded", "packed"), ("packed",)))
def test_rows_of_several_samples(kind: str, model: Path, tmp_path: Path) -> None:
    """Samples of a packed row run by themselves, and each has gradients of its own rows."""
    lengths, rows = (20, 12, 32, 9, 23, 16), ((0, 1), (2,), (3, 4), (5,))
    whole = [batch_of(ROWS, LENGTH, seed, vocabulary=VOCABULARY, padded=kind == "padded") for seed in range(2)]
    batches = whole if kind == "padded" else [packed(batch, lengths, rows) for batch in whole]
    ways = [
        trained(model, tmp_path / way[:5], batches, gradient=way, adjust=None, max_grad_norm=0.1)
        for way in ("dense", "rows:tables=blocks")
    ]
    assert ways[0][0] == ways[1][0]
    assert all(torch.equal(ways[0][1][key], ways[1][1][key]) for key in ways[0][1])


def test_rows_train_as_plain_pytorch_does(tmp_path: Path) -> None:
    """Against transformers' own model and torch's AdamW, which updates every row in each step."""
    path = save_with_tables(tmp_path / "model", torch.float32)
    batches, plain = batches_of(STEPS), PlainTrainer(path, 1e-3, 0.1, 0.5)
    expected = [plain.step(batch)[0] for batch in batches]
    losses, _ = short_run(
        path,
        tmp_path / "run",
        batches,
        export=tmp_path / "out",
        gradient="rows:tables=blocks",
        compute_dtype="float32",
        max_grad_norm=0.5,
        adjust=SPLIT,
    )
    assert losses == pytest.approx(expected, rel=1e-5)
    found = type(plain.model).from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name in TABLES:
        before = type(plain.model).from_pretrained(path, dtype=torch.float32).get_submodule(name).weight
        own, other = (each.get_submodule(name).weight.detach() for each in (found, plain.model))
        check_close(own, other, name)
        assert not torch.equal(own, before)


def test_a_run_goes_on_where_it_was_and_evaluates_as_ever(model: Path, tmp_path: Path) -> None:
    def opened(gradient: str, run: Path) -> Engine:
        return Engine.open(model, headrace.Options(output=run, gradient=gradient, learning_rate=1e-2, **LENGTHS))

    run = assert_lives_are_alike(opened, "rows:tables=blocks", batches_of(3), tmp_path)
    with touched(model), pytest.raises(RunDirectoryError, match="changed since the run began"):
        Engine.resume(run)


def test_a_plan_counts_rows_and_holds_no_table(model: Path, tmp_path: Path) -> None:
    plans, way = {}, "rows:tables=blocks"
    for gradient in ("dense", way):
        options = headrace.Options(output=tmp_path / gradient[:5], gradient=gradient, device_memory="1GiB", **LENGTHS)
        with Engine.open(model, options) as engine:
            assert engine.plan is not None
            plans[gradient] = engine.plan
            engine.step(batches_of(1)[0])
            engine.flush()
            rows = engine._run.rows
    plan = plans[way]
    assert [(each.unit, each.ids, each.table.learns) for each in plan.results.tables] == [(1, 16, True), (2, 16, True)]
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan.results.peak_bytes["host"]["rows of tables"] > 0
    assert plan.results.peak_bytes["ssd"]["tables, two places"] > 0
    assert plan.units[1].num_parameters == plans["dense"].units[1].num_parameters - 1177 * 4
    assert rows is not None
    assert 0 < rows.bytes_written <= sum(each.read_bytes(ROWS * LENGTH) // 2 for each in plan.results.tables)


def least_bytes(model: Path, **options: Any) -> int:
    """Return the least device memory with which a run is planned."""
    with pytest.raises(PlanInfeasible) as refusal:
        Engine.open(model, headrace.Options(device_memory=1, **LENGTHS, **options))
    assert refusal.value.tier == "device"
    return refusal.value.needed_bytes


@pytest.mark.parametrize("way", sampled(({}, {"adapter": "lora:rank=4"}), ({},)))
def test_small_tables_leave_their_blocks_where_the_whole_has_no_room(
    way: dict[str, Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained, or beside adapters: to the same bits; the run keeps its way, and another one takes it from the plan."""
    batches, found = batches_of(2), []
    by_rows = least_bytes(model, **way)
    with monkeypatch.context() as patch:
        patch.setattr(Tables, "take_rest", lambda self, *asked: None)
        whole = least_bytes(model, **way)
    assert by_rows < whole
    given: Plan | None = None
    for name, device in (("roomy", "1GiB"), ("rows", by_rows), ("given", "1GiB")):
        options = headrace.Options(output=tmp_path / name, device_memory=device, learning_rate=1e-2, **LENGTHS, **way)
        with Engine.open(model, options, plan=given if name == "given" else None) as engine:
            assert engine.plan is not None
            plan, losses = engine.plan, [engine.step(batches[0]).loss]
        with Engine.resume(tmp_path / name) as engine:
            losses.append(engine.step(batches[1]).loss)
            taken = sum(len(rows_within(block)) for block in engine.chain.runner.blocks)
            assert taken == 2 * (name != "roomy")
            assert len(learned(engine)) == taken * (not way)
            engine.save_pretrained(tmp_path / f"{name}-final")
        given = plan if name == "rows" else given
        found.append((losses, next((tmp_path / f"{name}-final").glob("*model.safetensors")).read_bytes(), plan))
    assert found[1][:2] == found[2][:2]
    grouped = replace(found[0][2], batch=found[1][2].batch, gradients=found[1][2].gradients)
    options = headrace.Options(output=tmp_path / "dense", device_memory="1GiB", learning_rate=1e-2, **LENGTHS, **way)
    with Engine.open(model, options, plan=grouped) as engine:
        assert [engine.step(batch).loss for batch in batches] == found[1][0]
        engine.save_pretrained(tmp_path / "dense-final")
    assert next((tmp_path / "dense-final").glob("*model.safetensors")).read_bytes() == found[1][1]
    words = "is trained by rows" if not way else "stays in the model's files"
    assert sum(note.startswith("a table") and words in note for note in found[1][2].results.notes) == 2
