"""Stages give the losses, norms and final weights of one process under one plan, bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import weights_of
from plain import LENGTH, SPLIT, batch_of
from ranks import staged_run
from short_run import short_run
from tiers import sampled

from headrace.engine.trainer import Engine
from headrace.peers.meet.relay import Relay
from headrace.peers.stages.stage_shares import StageShares
from headrace.peers.stages.staged import StagedEngine
from headrace.plan.value.plan import Plan
from headrace.plan.value.stage_place import StagePlace
from headrace.terms.errors import ConfigError
from headrace.terms.events import OpDone
from headrace.terms.lanes import split_lane
from headrace.terms.options.options import Options

STEPS, SPLIT_IN_FOUR = 3, {**SPLIT, "num_micro_batches": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"model": "llama", "max_grad_norm": 0.5},
    "tied": {"model": "llama-tied", "max_grad_norm": 0.5},
    "tied, immediate": {"model": "llama-tied"},
    "lora": {"model": "llama", "adapter": "lora:rank=4", "max_grad_norm": 0.5},
    "tied lora": {"model": "llama-tied", "adapter": "lora:rank=4"},
    "a device of its own": {"model": "llama-tied", "max_grad_norm": 0.5, "device_memory": "1GiB"},
    "float16": {"model": "llama", "compute_dtype": "float16"},
    "seldom": {"model": "llama", "max_grad_norm": 0.5, "checkpoint_every": 2},
    "matrices": {"model": "llama", "train": "matrices"},
} | {
    rule: {"model": "llama", "optimizer": rule, "max_grad_norm": 0.5}
    for rule in ("adamw:moments=int8", "sgd:momentum=0.9", "lion", "lomo", "muon", "adafactor")
}
CASES = [(setting, size) for setting in SETTINGS for size in ((2, 3) if setting in ("adamw", "tied") else (2,))]


@pytest.mark.parametrize(("setting", "size"), sampled(CASES, [("adamw", 2)]))
def test_stages_give_the_bits_of_one_process(setting: str, size: int, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    options = dict(SETTINGS[setting])
    path = model_dir(options.pop("model"), "bfloat16")
    batches, plans = [batch_of(8, LENGTH, seed) for seed in range(STEPS)], list[Plan]()
    split = SPLIT_IN_FOUR
    scores = list[float]()

    def look(engine: Engine) -> None:
        plans.append(engine.plan)
        scores.append(engine.evaluate(batches[0]).loss)

    losses, weights = short_run(path, tmp_path / "local", batches, adjust=split, inspect=look, **options)
    # A run of one process reads what adapters stand beside in the model's files, so its plan is another.
    given: dict[str, Any] = {"adjust": split} if "adapter" in options else {"plan": plans[0]}
    results, found = staged_run(
        path,
        tmp_path / "stages",
        batches,
        size,
        drive=lambda engine: scores.append(engine.evaluate(batches[0]).loss),
        **given,
        **options,
    )
    assert [result.loss for result in results] == losses
    assert scores[0] == scores[1]
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.wide
@pytest.mark.parametrize("setting", sampled(["adamw", "tied lora", "a device of its own"], ["a device of its own"]))
def test_sums_that_wait_on_the_ssd_change_no_bit(
    setting: str, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(SETTINGS[setting])
    path, batches = model_dir(options.pop("model"), "bfloat16"), [batch_of(8, LENGTH, seed) for seed in range(STEPS)]
    found, done = [], list[OpDone]()
    make = StagePlace.of
    for sums in ("host", "ssd"):
        monkeypatch.setattr(StagePlace, "of", lambda *place, sums=sums, **more: replace(make(*place, **more), sums=sums))
        sink = done.append if sums == "ssd" else lambda event: None
        adjust = {**SPLIT_IN_FOUR, "stage": lambda plan, sums=sums: replace(plan.stage, groups=4, in_flight=3, sums=sums)}
        run = staged_run(path, tmp_path / sums, batches, 2, adjust=adjust, sink=sink, **options)
        found.append(([(result.loss, result.grad_norm) for result in run[0]], run[1]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])
    for verb in ("sum-out", "sum-in"):
        ops = [event for event in done if isinstance(event, OpDone) and event.verb == verb]
        assert {split_lane(op.lane)[1] for op in ops} == {0, 1}, "at both stages"
        mine = [op for op in ops if op.lane.startswith("ssd")]
        assert len(mine) == STEPS * 3 * len({op.unit for op in mine}), "once between two groups"


def test_shares_of_stages_are_those_of_compute_beside_the_most_that_there_can_be() -> None:
    shares = StageShares()
    assert shares.to_json(4) is None
    said = [{"compute_seconds": 99.0, "transfer_seconds": 9.0}, {"compute_seconds": 99.0, "transfer_seconds": 0.0}]
    shares.add(said, 999.0)
    assert shares.to_json(4) is not None, "a run of one step has that alone"
    for busy, seconds in ((4.0, 10.0), (8.0, 14.0)):
        shares.add(
            [{"compute_seconds": busy, "transfer_seconds": 0.25}, {"compute_seconds": 2.0, "transfer_seconds": 0.5}], seconds
        )
    found = shares.to_json(4)
    assert found is not None
    assert found["busy_shares"] == [pytest.approx(12 / 24, abs=1e-4), pytest.approx(4 / 24, abs=1e-4)]
    assert found["utilisation"] == 0.5
    # Six seconds a step on average: a group takes 1.5 s at the first stage, which has nobody to wait for.
    assert found["bound"] == 1.0
    turned = StageShares()
    for _ in range(2):
        turned.add([{"compute_seconds": 2.0, "transfer_seconds": 0.5}, {"compute_seconds": 6.0, "transfer_seconds": 0.5}], 10.0)
    # A group takes 0.5 s at the first stage and 0.5 s on the link and back, before the slowest one can begin.
    assert turned.to_json(4)["bound"] == pytest.approx(4 * 1.5 / (4 * 1.5 + 0.5 + 2 * 0.5), abs=1e-4)


@pytest.mark.deep
def test_a_checkpoint_between_steps_is_that_of_one_process(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path, batches, plans = model_dir("llama-tied", "bfloat16"), [batch_of(8, LENGTH, seed) for seed in range(2)], list[Plan]()

    def keep_and_go_on(name: str, engine: Engine) -> None:
        plans.append(engine.plan)
        engine.begin_saving(tmp_path / name).wait()
        engine.step(batches[0])

    _, weights = short_run(
        path, tmp_path / "local", batches, adjust=SPLIT_IN_FOUR, inspect=partial(keep_and_go_on, "kept-local")
    )
    drive = partial(keep_and_go_on, "kept-stages")
    _, found = staged_run(path, tmp_path / "stages", batches, 2, drive=drive, plan=plans[0])
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    kept, other = weights_of(tmp_path / "kept-local"), weights_of(tmp_path / "kept-stages")
    assert kept.keys() == other.keys()
    assert all(torch.equal(kept[name], other[name]) for name in kept)
    assert any(not torch.equal(kept[name], weights[name]) for name in kept)


@pytest.mark.deep
def test_eight_bits_halve_what_crosses_and_change_losses_little(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, batches = model_dir("llama", "bfloat16"), [batch_of(8, LENGTH, seed) for seed in range(STEPS)]
    crossed, give = list[int](), Relay.give

    def counted(relay: Relay, data: Any) -> None:
        crossed.append(data.nbytes)
        give(relay, data)

    monkeypatch.setattr(Relay, "give", counted)
    losses, moved = list[list[float]](), list[int]()
    for stage_dtype in (None, "int8"):
        crossed.clear()
        folder = tmp_path / str(stage_dtype)
        results, _ = staged_run(path, folder, batches, 2, adjust=SPLIT_IN_FOUR, stage_dtype=stage_dtype)
        losses.append([result.loss for result in results])
        moved.append(sum(crossed))
    hidden = 64
    assert moved[0] == 4 * STEPS * 8 * LENGTH * hidden, "4 T h a step, in 16 bits and both ways"
    assert moved[1] == 2 * STEPS * 8 * LENGTH * (hidden + 4), "8 bits, and a scale for each token"
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert losses[1] != losses[0]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"gradient_sum": "tree"}, "leave tree out"),
        ({"gradient": "lsp:rank=4"}, "lsp"),
        ({"interpreter": "plain"}, "plain"),
        ({"loss": "dpo"}, "all rows in one place, and stages share out"),
        ({"adapter": "table:rows=36,layers=1,top=5"}, "stages do not share out rows"),
    ],
)
def test_what_stages_cannot_do_is_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StagedEngine._check(Options.of(asked))


def test_cuts_without_stages_are_refused(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only a run in stages"):
        Engine.open(model_dir("llama", "bfloat16"), Options(cuts=(2,), output=tmp_path / "run"))
    assert not (tmp_path / "run").exists()
