"""HeadraceTrainer beside `headrace train`, bit for bit, and beside transformers' own Trainer, to rounding.

Run: pytest tests/integrations/test_trainer.py
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from first_plans import first_that_fits
from plan_changes import changed
from tiers import sampled
from trainers import TEXTS, USUAL, Make, StopAfter, logged, weights
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import headrace.ask.planner
from headrace.plan.clock.machine_profiles import load_profile
from headrace.plan.search.given import load_plan
from headrace.plan.value.plan import Plan
from headrace.runs import train
from headrace.terms.options.run_options import RunOptions


def test_a_run_has_the_bits_of_headrace_train(make: Make, talking: Path, tmp_path: Path) -> None:
    """The same rows in the same order, each its own, under the same plan."""
    trainer = make(**COSINE)
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    done = train(as_command(trainer, talking, tmp_path, plan=tmp_path / "run"))
    ours, theirs = weights(tmp_path / "out"), weights(done.final)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    lines = [json.loads(line) for line in (tmp_path / "stock" / "metrics.jsonl").read_text().splitlines()]
    assert logged(trainer, "loss") == [np.float32(line["loss"]) for line in lines]
    assert logged(trainer, "learning_rate") == [line["lr"] for line in lines]


COSINE: dict[str, Any] = {
    "train_sampling_strategy": "sequential",
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "warmup_steps": 2,
}


def as_command(trainer: Any, model: Path, folder: Path, **more: Any) -> RunOptions:
    """What `headrace train` is asked for, to do as a trainer with `COSINE` does."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    run = {
        "model": model,
        "data": data,
        "output": folder / "stock",
        "host_memory": "2GiB",
        "cache": folder / "cache",
        "compute_dtype": "float32",
        "optimizer": "adamw:beta2=0.999",
        "weight_decay": 0.1,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "lr_schedule": "cosine",
        "tokens_per_step": trainer.plan.batch.sequence_length * 4,
        "sequence_length": trainer.plan.batch.sequence_length,
        "max_steps": 6,
        "seed": 7,
        "packing": False,
        "shuffle": False,
    }
    return RunOptions.of(run | more)


@pytest.mark.wide
def test_runs_that_take_other_plans_on_their_way_have_the_bits_of_one_that_does_not(
    make: Make, talking: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, with the search's own plans: they put on drives what the first plan keeps in memory, or the reverse."""
    homes = []

    def search(problem: Any, ceilings: Any = None) -> Plan:
        plan = first_that_fits(problem)
        if ceilings is not None:  # that steps have shown
            homes.append("device" if len(homes) % 2 else "ssd")
            plan = changed(plan, stash_tiers=(homes[-1],) * plan.num_blocks, stash_slots=2, host_slots=2, prefetch=1)
        return plan

    first = make(**COSINE)
    first.train()
    first.save_model(str(tmp_path / "out"))
    monkeypatch.setattr(headrace.ask.planner, "make_plan", search)
    monkeypatch.setattr("headrace.engine.replanning.is_worth_taking", lambda plan, now, machine, seen: 1.0)
    monkeypatch.setattr("headrace.runs.replanning._AFTER_STEPS", 2)
    monkeypatch.setattr("headrace.runs.replanning._LEAST_SECONDS", 0.0)
    second = make("second", **COSINE)
    second.train()
    second.save_model(str(tmp_path / "second-out"))
    assert homes == ["ssd", "device"]
    done = train(as_command(first, talking, tmp_path))
    assert homes == ["ssd", "device"] * 2
    expected = weights(tmp_path / "out")
    for folder, found in ((tmp_path / "second", weights(tmp_path / "second-out")), (tmp_path / "stock", weights(done.final))):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found), folder
        assert set(load_plan(folder).stash.tiers) == {"device"}
        assert load_plan(folder).host_slots == 2
        assert load_profile(folder / "machine.json").name == "this machine"
        assert json.loads((folder / "summary.json").read_text())["machine"] == "this machine"


ASKED = {
    "defaults": {"weight_decay": 0.1, "warmup_steps": 2},
    "polynomial": {"lr_scheduler_type": "polynomial", "max_grad_norm": 0, "max_steps": -1, "num_train_epochs": 1.4},
    "sgd": {"optim": "sgd", "learning_rate": 0.1, "weight_decay": 0.1, "train_sampling_strategy": "group_by_length"},
    "restarts": {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
    "wsd": {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 2}, "warmup_steps": 1},
    "inverse": {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2, "adam_beta2": 0.9, "adam_epsilon": 1e-6},
    "no shuffle": {"train_sampling_strategy": "sequential", "data_seed": 3, "dataloader_num_workers": 1},
}


@pytest.mark.parametrize("name", sampled(ASKED, ["defaults"]))
def test_losses_and_weights_are_those_of_stock_trainer(make: Make, talking: Path, tmp_path: Path, name: str) -> None:
    asked = ASKED[name]
    trainer = make(**asked)
    output = trainer.train()
    trainer.save_model()
    model = AutoModelForCausalLM.from_pretrained(talking)
    args = TrainingArguments(output_dir=str(tmp_path / "stock"), **{**USUAL, **asked})
    stock = Trainer(model, args, data_collator=trainer.data_collator, train_dataset=trainer.train_dataset)
    expected = stock.train()
    assert output.global_step == expected.global_step
    assert output.training_loss == pytest.approx(expected.training_loss, rel=1e-5)
    assert output.metrics.keys() == expected.metrics.keys()
    for figure in ("loss", "grad_norm", "learning_rate", "epoch"):
        ours, theirs = logged(trainer, figure), logged(stock, figure)
        assert len(theirs) >= 6
        assert ours == pytest.approx(theirs, rel=1e-4), figure
    state = model.state_dict()
    for parameter, tensor in weights(tmp_path / "run").items():
        assert torch.allclose(tensor, state[parameter], rtol=1e-4, atol=2e-5), parameter


class Flags(TrainerCallback):
    """Raises flags at some steps, and writes down what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log = state.global_step == 2
        control.should_evaluate = control.should_save = state.global_step == 3
        control.should_training_stop = state.global_step == 4

    def on_log(self, args, state, control, **kwargs):
        self.calls.append(f"log {state.global_step}")

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        assert metrics["eval_loss"] > 0
        self.calls.append(f"evaluate {state.global_step}")

    def on_save(self, args, state, control, **kwargs):
        assert weights(Path(args.output_dir) / f"checkpoint-{state.global_step}")
        self.calls.append(f"save {state.global_step}")

    def on_train_end(self, args, state, control, **kwargs):
        self.calls.append(f"end {state.global_step}")


def test_callbacks_are_called_and_their_flags_heeded(make: Make, texts: Dataset) -> None:
    flags = Flags()
    trainer = make(callbacks=[flags], eval_dataset=texts.select(range(5)), logging_strategy="no")
    output = trainer.train()
    assert flags.calls == ["log 2", "log 3", "evaluate 3", "save 3", "log 4", "end 4"]
    assert output.global_step == 4


def test_the_evaluation_loss_is_the_mean_over_tokens(make: Make, talking: Path, texts: Dataset) -> None:
    """Before training, by a plain model; whatever the batches are."""
    trainer = make(eval_dataset=texts.select(range(5)), per_device_eval_batch_size=3)
    found = trainer.evaluate()
    model, total, tokens = AutoModelForCausalLM.from_pretrained(talking).requires_grad_(False), 0.0, 0
    for row in trainer.eval_dataset:
        ids, labels = (torch.tensor(row[name])[None] for name in ("input_ids", "labels"))
        count = int((labels[:, 1:] != -100).sum())
        total, tokens = total + float(model(ids, labels=labels).loss) * count, tokens + count
    assert found["eval_loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert trainer.train().global_step == 6  # goes on where it was


@pytest.mark.wide
def test_a_stopped_run_goes_on_with_the_same_bits_and_logs(make: Make, tmp_path: Path, texts: Dataset) -> None:
    whole = make("whole", eval_dataset=texts, eval_strategy="steps", eval_steps=2)
    whole.train()
    whole.save_model()
    given = {"eval_dataset": texts, "eval_strategy": "steps", "eval_steps": 2, "plan": tmp_path / "whole"}
    stopped = make("run", callbacks=[StopAfter(3)], **given)
    stopped.train()
    stopped.end()
    again = make("run", **given)
    output = again.train(resume_from_checkpoint=True)
    again.save_model()
    assert output.global_step == 6
    for name in ("loss", "eval_loss", "grad_norm", "learning_rate", "epoch"):
        assert logged(again, name) == logged(whole, name), name
    ours, theirs = weights(tmp_path / "run"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
