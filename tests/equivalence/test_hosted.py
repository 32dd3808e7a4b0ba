"""Hidden states that wait in host memory between blocks change no bit, wherever block inputs and kept outputs wait."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, ROWS, SPLIT, batch_of, train
from plan_changes import changed
from short_run import short_run
from tiers import sampled

import headrace
from headrace.engine.seams import seams_of
from headrace.engine.trainer import Engine
from headrace.plan.value.choices import Hosted
from headrace.plan.value.plan import Plan

ONE_ROW = SPLIT | {"micro_batch_sequences": 1, "num_micro_batches": ROWS}
STEPS = 2


def with_kept(plan: Plan) -> dict[str, Any]:
    """Return changes of a plan in which two blocks keep what their first two operators make, and one keeps nothing."""
    kept = tuple((0, 1) if block % 2 else () for block in range(plan.num_blocks))
    return {"kept": kept, "kept_bytes": tuple(1 << 16 if ordinals else 0 for ordinals in kept)}


def hosted(home: str, *, coming: int = 2, going: int = 2, kept: bool = False) -> dict[str, Any]:
    """Return changes of a plan: hidden states wait in host memory, and block inputs at `home`."""
    more = {name: lambda plan, name=name: with_kept(plan)[name] for name in ("kept", "kept_bytes")} if kept else {}
    homes = {"mixed": lambda plan: tuple("ssd" if block % 2 else "host" for block in range(plan.num_blocks))}
    tiers = homes.get(home, lambda plan: (home,) * plan.num_blocks)
    return {"hosted": Hosted(coming=coming, going=going), "stash_tiers": tiers, "stash_slots": 2} | more


def same(path: Path, tmp_path: Path, change: dict[str, Any], **options: Any) -> None:
    """Assert that a run whose hidden states wait in host memory has the losses and weights of one where they stay."""
    expected = train(path, tmp_path / "staying", steps=STEPS, adjust=ONE_ROW, device_memory="1GiB", **options)
    found = train(path, tmp_path / "hosted", steps=STEPS, adjust=ONE_ROW | change, device_memory="1GiB", **options)
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])


CASES: dict[str, dict[str, Any]] = {
    "host": {"change": hosted("host")},
    "ssd, kept": {"change": hosted("ssd", kept=True)},
    "host, kept, plain": {"change": hosted("host", kept=True), "interpreter": "plain"},
    "ssd, plain": {"change": hosted("ssd", coming=1, going=1), "interpreter": "plain"},
    "mixed, kept": {"change": hosted("mixed", coming=3, going=1, kept=True)},
    "more slots than micro-batches": {"change": hosted("ssd", coming=16, going=9, kept=True)},
    "clipped": {"change": hosted("host"), "max_grad_norm": 0.1},
    "adapters": {"change": hosted("ssd"), "adapter": "lora:rank=4"},
    "a tree": {"change": hosted("host", kept=True), "gradient_sum": "tree"},
}


@pytest.mark.parametrize("case", sampled(CASES, ("host", "ssd, kept", "ssd, plain")))
@pytest.mark.parametrize("name", sampled(("llama-tied", "gpt2-dropout", "mixtral-aux", "gemma3"), ("llama-tied",)))
def test_hidden_states_in_host_memory_change_no_bit(
    name: str, case: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    options = dict(CASES[case])
    same(model_dir(name, "bfloat16"), tmp_path, options.pop("change"), compute_dtype="bfloat16", **options)


@pytest.mark.wide
def test_a_run_goes_on_where_it_was_and_evaluates_as_ever(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path, batches = model_dir("llama-tied", "bfloat16"), [batch_of(ROWS, LENGTH, seed) for seed in range(3)]
    more: dict[str, Any] = {"tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH, "learning_rate": 1e-2}
    found = []
    for name, change in (("staying", {}), ("hosted", hosted("ssd", kept=True))):

        def adjusted(plan: Plan, change: dict[str, Any] = change) -> Plan:
            changes = {name: value(plan) if callable(value) else value for name, value in (ONE_ROW | change).items()}
            return changed(plan, **changes)

        options = headrace.Options(output=tmp_path / name, device_memory="1GiB", **more)
        with Engine.open(path, options, adjust_plan=adjusted) as engine:
            said = [engine.step(batches[0]).loss, engine.evaluate(batches[2]).loss]
        with Engine.resume(tmp_path / name) as engine:
            assert engine.plan is not None
            assert (engine.plan.hosted is None) == (name == "staying")
            said += [engine.step(batches[1]).loss, engine.evaluate(batches[2]).loss]
            said.append(engine.next_logits({"input_ids": batches[2]["input_ids"]}).tolist())
        found.append(said)
    assert found[0] == found[1]


@pytest.mark.deep
def test_experts_that_come_singly_meet_hidden_states_in_host_memory(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """A group of micro-batches waits at a block's experts, and what it waits with comes together."""
    adapter = "lora:rank=4,target_modules=o_proj+experts"
    seams = replace(seams_of(headrace.Options(adapter=adapter)), parted=True)

    def together(plan: Plan) -> Any:
        return replace(plan.experts, together=2, in_round=1)

    change = hosted("ssd", coming=1, going=1) | {"experts": together}
    same(model_dir("mixtral-aux", "bfloat16"), tmp_path, change, compute_dtype="bfloat16", adapter=adapter, seams=seams)


@pytest.mark.deep
def test_a_loss_of_the_whole_step_reads_hidden_states_twice(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Log-probabilities first, then their gradients: the head's input comes from host memory for both."""
    batches = [batch_of(ROWS, LENGTH, seed) | {"reference_log_probs": torch.full((ROWS,), -40.0)} for seed in range(2)]
    path, found = model_dir("llama-tied", "bfloat16"), []
    for number, change in enumerate(({}, hosted("host"))):
        options: dict[str, Any] = {"device_memory": "1GiB", "adjust": ONE_ROW | change, "loss": "dpo"}
        found.append(short_run(path, tmp_path / f"run{number}", batches, **options))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], weight) for name, weight in found[1][1].items())
