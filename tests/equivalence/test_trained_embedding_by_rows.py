"""A trained embedding whose rows are read and updated one by one has the bits of one that is updated whole."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from life_by_rows import assert_lives_are_alike
from plain import LENGTH, ROWS, SPLIT, batch_of, train
from tiers import sampled
from transformers import AutoModelForCausalLM

import headrace
from headrace.engine.trainer import Engine
from headrace.model.by_rows.learned_rows import LearnedRows
from headrace.peers.local_steps.engine import Learner
from headrace.plan.value.plan import Plan
from headrace.terms.errors import ConfigError, PlanInfeasible

STEPS = 4
EMBEDDING = "model.embed_tokens.weight"
CASES: dict[str, dict[str, Any]] = {
    "clipped": {"max_grad_norm": 0.1},
    "unclipped": {"max_grad_norm": None},
    "bfloat16": {"compute_dtype": "bfloat16"},
    "float16, a schedule": {"compute_dtype": "float16", "lr_schedule": "cosine", "max_steps": 9},
    "a device": {"device_memory": "1GiB", "compute_dtype": "bfloat16"},
    "a device, plain": {"device_memory": "1GiB", "interpreter": "plain"},
    "plain": {"interpreter": "plain", "max_grad_norm": 0.1},
    "seldom commits": {"checkpoint_every": 3},
    "sgd": {"optimizer": "sgd:momentum=0.9", "max_grad_norm": 0.1},
    "lion, whole sums": {"optimizer": "lion", "compute_dtype": "bfloat16", "gradient_dtype": "float32"},
    "lomo, clipped steps run twice": {"optimizer": "lomo", "max_grad_norm": 0.1},
}


def trained(path: Path, run: Path, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    more = {"learning_rate": 1e-2, "weight_decay": 0.1, "compute_dtype": "float32", "adjust": SPLIT, **options}
    return train(path, run, steps=STEPS, **more)


@pytest.mark.parametrize("case", sampled(CASES, ("clipped", "bfloat16")))
@pytest.mark.parametrize("name", sampled(("llama", "mixtral-aux", "deepseek"), ("llama",)))
def test_rows_have_the_bits_of_dense_updates(name: str, case: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir(name, "bfloat16" if CASES[case].get("compute_dtype") == "bfloat16" else "float32")
    kinds: list[type] = []

    def look(engine: Engine) -> None:
        kinds.append(type(engine.chain.model.get_input_embeddings()))

    expected, wanted = trained(path, tmp_path / "dense", **CASES[case])
    losses, found = trained(path, tmp_path / "rows", gradient="rows", inspect=look, **CASES[case])
    assert kinds == [LearnedRows]
    assert losses == expected
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    first = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).get_input_embeddings().weight.detach()
    ids = torch.cat([batch_of(ROWS, LENGTH, seed)["input_ids"].flatten() for seed in range(STEPS)]).unique()
    other = torch.ones(len(first), dtype=torch.bool)
    other[ids] = False
    assert other.any(), "some rows were never read"
    moved = (found[EMBEDDING].float() != first).any(dim=1)
    assert moved[ids].all()
    assert moved[other].all() or CASES[case].get("compute_dtype") == "bfloat16", "and decayed"


def opened(path: Path, output: Path, **options: Any) -> Engine:
    given: dict[str, Any] = {"host_memory": "4GiB", "tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH}
    return Engine.open(path, headrace.Options(output=output, learning_rate=1e-2, **given | options))


@pytest.mark.wide
def test_a_run_goes_on_where_it_was_and_evaluates_as_ever(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path, batches = model_dir("llama", "bfloat16"), [batch_of(ROWS, LENGTH, seed) for seed in range(3)]

    def open_with(gradient: str, run: Path) -> Engine:
        return opened(path, run, gradient=gradient, compute_dtype="bfloat16")

    assert_lives_are_alike(open_with, "rows", batches, tmp_path)


@pytest.mark.wide
def test_a_plan_counts_rows_and_holds_no_table(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path, plans = model_dir("llama"), {}
    for way in ("dense", "rows"):
        with opened(path, tmp_path / way, gradient=way, device_memory="1GiB") as engine:
            assert engine.plan is not None
            plans[way] = engine.plan
            engine.step(batch_of(ROWS, LENGTH, 0))
            engine.flush()
            rows = engine._run.rows
    plan = plans["rows"]
    assert plan.embedding is not None
    assert plan.embedding.learns
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert "rows of tables" in plan.results.peak_bytes["host"]
    assert plans["dense"].peak("device") - plan.peak("device") >= 384 * 64 * 2, "the table in bfloat16"
    assert rows is not None
    pages = len((batch_of(ROWS, LENGTH, 0)["input_ids"] // 5).unique())
    assert rows.bytes_written == pages * 4096, "five rows of 64 numbers, with moments, share a page"
    assert plan.written_embedding_bytes >= rows.bytes_written


class Whole(Engine):
    """An engine that never trains an embedding by rows unless it is told to."""

    _may_learn_rows = False


def least_bytes(kind: type[Engine], path: Path, **options: Any) -> int:
    given: dict[str, Any] = {"host_memory": "4GiB", "tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH}
    with pytest.raises(PlanInfeasible) as refusal:
        kind.open(path, headrace.Options(device_memory=1, compute_dtype="bfloat16", **given, **options))
    assert refusal.value.tier == "device"
    return refusal.value.needed_bytes


@pytest.mark.wide
def test_the_planner_takes_rows_where_the_whole_has_no_room(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """The run keeps its way when it is resumed, and another run takes it from the plan."""
    path, batches, found = model_dir("llama", "bfloat16"), [batch_of(ROWS, LENGTH, seed) for seed in range(2)], []
    whole, by_rows = least_bytes(Whole, path), least_bytes(Engine, path)
    assert whole - by_rows >= 384 * 64 * 2, "the table in bfloat16"
    with opened(path, tmp_path / "roomy", device_memory=whole, compute_dtype="bfloat16") as engine:
        roomy = engine.plan
        assert roomy is not None
        assert roomy.embedding is None
    for name, device in (("rows", by_rows), ("given", "1GiB"), ("whole", "1GiB")):
        plan = found[0][1] if name == "given" else None
        if name == "whole":
            plan = replace(roomy, batch=found[0][1].batch, gradients=found[0][1].gradients)
        options: dict[str, Any] = {"device_memory": device, "compute_dtype": "bfloat16", "learning_rate": 1e-2}
        lengths = {"host_memory": "4GiB", "tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH}
        run = tmp_path / name
        with Engine.open(path, headrace.Options(output=run, **options, **lengths), plan=plan) as engine:
            made = engine.plan
            losses = [engine.step(batches[0]).loss]
        with Engine.resume(run) as engine:
            losses.append(engine.step(batches[1]).loss)
            assert isinstance(engine.chain.model.get_input_embeddings(), LearnedRows) == (name != "whole")
            engine.save_pretrained(tmp_path / f"{name}-final")
        found.append((losses, made, (tmp_path / f"{name}-final" / "model.safetensors").read_bytes()))
    assert found[0][1].embedding.learns
    assert any("the embedding is trained by rows" in note for note in found[0][1].results.notes)
    for losses, _, content in found[1:]:
        assert losses == found[0][0]
        assert content == found[0][2]


@pytest.mark.wide
def test_a_tree_keeps_the_whole_table(model_dir: Callable[..., Path]) -> None:
    """Rows add micro-batches in their order, so that they would have other bits than a tree."""
    path = model_dir("llama", "bfloat16")
    assert least_bytes(Engine, path, gradient_sum="tree") == least_bytes(Whole, path, gradient_sum="tree")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("llama-tied", {}, "the head has the weights of the embedding"),
        ("gemma3", {}, "the head has the weights of the embedding"),
        ("llama", {"optimizer": "adafactor"}, "updates of Adafactor cannot be replayed row by row"),
        ("llama", {"train": "matrices"}, "rows trains the embedding, and train: matrices does not; give dense"),
    ],
)
def test_what_needs_the_whole_table_says_so(
    name: str, options: dict[str, Any], said: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(model_dir(name), tmp_path / "run", gradient="rows", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.wide
@pytest.mark.parametrize("options", [{"gradient": "rows"}, {"adapter": "table:rows=16,top=4"}])
def test_learners_do_not_merge_rows(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="learners do not merge rows"):
        Learner.open("nothing is read", headrace.Options(**options))
