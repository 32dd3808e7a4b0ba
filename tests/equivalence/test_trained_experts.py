"""Trained experts that come one at a time give the bits of whole blocks, and the numbers of plain PyTorch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, ROWS, SPLIT, PlainTrainer, batch_of, check_close, everything, train
from test_parted_experts import together
from tiers import sampled
from transformers import AutoModelForCausalLM

import headrace
from headrace.engine.seams import Seams
from headrace.engine.trainer import Engine
from headrace.flow.weights.experts import Experts
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.opened import GenerationModel
from headrace.plan.value.plan import Plan
from headrace.terms.errors import PlanInfeasible

PARTED = Seams(parted=True)
ON_SSD = {"stash_tiers": ("ssd",) * 4, "stash_slots": 2}
LATE = {"update_policy": "deferred", "late_units": everything, "resident_states": ()}
WHOLE_STEP = SPLIT | {"micro_batch_sequences": ROWS, "num_micro_batches": 1, "accumulate": False}

PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": {"change": {"experts": together(2)}},
    "host, in place": {"change": {"experts": together(1, 3)}, "split": WHOLE_STEP},
    "a device": {"change": {"experts": together(3, 2)}, "device_memory": "1GiB"},
    "host, graphs made again": {"change": {"experts": together(2, remakes=True)}},
    "a device, graphs made again": {"change": {"experts": together(2, remakes=True), **ON_SSD}, "device_memory": "1GiB"},
    "a device, in place": {"change": {"experts": together(1)}, "split": WHOLE_STEP, "device_memory": "1GiB"},
    "a device, in groups": {"change": {"experts": together(2), **ON_SSD}, "device_memory": "1GiB"},
    "a device, one by one, plain": {
        "change": {"experts": together(1, 3), "host_slots": 2, "prefetch": 1, "device_slots": 2},
        "device_memory": "1GiB",
        "interpreter": "plain",
    },
    "a device, clipped, late": {"change": {"experts": together(2), **LATE}, "device_memory": "1GiB", "max_grad_norm": 0.1},
    "a device, run again where clipped": {
        "change": {"experts": together(2)},
        "device_memory": "1GiB",
        "max_grad_norm": 0.1,
        "optimizer": "adalomo",
    },
    "a device, whole matrices": {"change": {"experts": together(2)}, "device_memory": "1GiB", "optimizer": "muon"},
}
NAMES = ("mixtral-aux", "many-experts", "gpt-oss", "deepseek")
QUICK = (("many-experts", "a device, in groups"),)


@pytest.mark.parametrize("dtype", sampled(("bfloat16", "float32"), ("bfloat16",)))
@pytest.mark.parametrize(("name", "placement"), sampled([(name, where) for name in NAMES for where in PLACEMENTS], QUICK))
def test_trained_experts_that_come_singly_train_as_whole_blocks(
    name: str, placement: str, dtype: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    options = {"compute_dtype": dtype, **PLACEMENTS[placement]}
    change, split, path = options.pop("change"), options.pop("split", SPLIT), model_dir(name, dtype)
    if "stash_tiers" in change:
        change = change | {"stash_tiers": lambda plan: ("ssd",) * plan.num_blocks}
    whole = {key: value for key, value in change.items() if key != "experts"}
    expected = train(path, tmp_path / "whole", steps=2, adjust=split | whole, **options)
    found = train(path, tmp_path / "parted", steps=2, adjust=split | change, seams=PARTED, **options)
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert not [name for name in expected[1] if not torch.equal(found[1][name], expected[1][name])]


@pytest.mark.wide
@pytest.mark.parametrize("name", sampled(("mixtral-aux", "many-experts"), ("many-experts",)))
def test_float32_training_of_single_experts_is_plain_pytorch(name: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path, out = model_dir(name), tmp_path / "out"
    plain = PlainTrainer(path, 1e-3, 0.1, 0.5)
    expected = [plain.step(batch_of(ROWS, LENGTH, seed))[0] for seed in range(3)]
    options: dict[str, Any] = {"compute_dtype": "float32", "max_grad_norm": 0.5, "device_memory": "1GiB", "export": out}
    losses, _ = train(path, tmp_path / "run", adjust=SPLIT | {"experts": together(2, 2)}, seams=PARTED, **options)
    assert losses == pytest.approx(expected, rel=2e-6)
    ours = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    for (key, got), want in zip(ours.named_parameters(), plain.model.parameters(), strict=True):
        check_close(got, want, key)


@pytest.mark.wide
def test_a_run_goes_on_where_it_was_evaluated_and_read_unfinished(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path, batches = model_dir("many-experts", "bfloat16"), [batch_of(ROWS, LENGTH, seed) for seed in range(3)]
    more: dict[str, Any] = {"tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH, "device_memory": "1GiB"}
    found = []
    for seams, run in ((None, tmp_path / "whole"), (PARTED, tmp_path / "parted")):
        with Engine.open(path, headrace.Options(output=run, **more), seams=seams) as engine:
            assert engine.plan is not None
            assert (engine.plan.experts is not None) == (seams is not None)
            said = [engine.step(batches[0]).loss, engine.evaluate(batches[2]).loss]
        with Engine.resume(run) as engine:
            assert engine.plan is not None
            assert (engine.plan.experts is not None) == (seams is not None)
            said += [engine.step(batches[1]).loss, engine.evaluate(batches[2]).loss]
            said.append(engine.next_logits({"input_ids": batches[2]["input_ids"]}).tolist())
        found.append(said)
    assert found[0] == found[1]
    Generator.open(tmp_path / "parted", opened=GenerationModel.of_store).close()


@pytest.mark.wide
def test_an_expert_goes_to_the_device_once_for_a_group_and_not_if_nobody_wants_it(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    own = Experts.upload

    def noting(experts: Experts, op: Any) -> None:
        sent.extend((op.unit, expert) for expert in experts.of_round(op))
        own(experts, op)

    monkeypatch.setattr(Experts, "upload", noting)
    options = headrace.Options(output=tmp_path / "run", tokens_per_step=4, sequence_length=4, device_memory="1GiB")
    with Engine.open(model_dir("many-experts"), options, seams=PARTED) as engine:
        engine.step({**batch_of(1, 4, 0)})
    assert {sent.count(each) for each in sent} == {2}, "once forward, once backward"
    assert len(set(sent)) <= 3 * 4 * 2, "of 48 experts, four tokens of three blocks choose at most two each"


@pytest.mark.deep
def test_trained_experts_become_parts_where_whole_blocks_have_no_room(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    def opened(device_bytes: int, **more: Any) -> Plan:
        options = headrace.Options(
            output=tmp_path / str(device_bytes),
            host_memory="4GiB",
            device_memory=device_bytes,
            tokens_per_step=ROWS * LENGTH,
            sequence_length=LENGTH,
            **more,
        )
        with Engine.open(model_dir("many-experts"), options) as engine:
            assert engine.plan is not None
            return engine.plan

    assert opened(1 << 30).experts is None
    with pytest.raises(PlanInfeasible) as refusal:
        opened(1)
    with pytest.raises(PlanInfeasible) as of_a_tree:
        opened(1, gradient_sum="tree")
    assert of_a_tree.value.needed_bytes > refusal.value.needed_bytes, "there experts come with their blocks"
    plan = opened(refusal.value.needed_bytes)
    assert plan.experts is not None
    assert plan.experts.is_trained
    assert Plan.from_json(plan.to_json()) == plan
    assert any("experts come one at a time" in note for note in plan.results.notes)
