"""Frozen experts that come one at a time give the bits of whole blocks, wherever things live."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, ROWS, SPLIT, batch_of, train
from saved_models import touched
from tiers import sampled

import headrace
from headrace.engine.seams import Seams, seams_of
from headrace.engine.trainer import Engine
from headrace.flow.step import parted as parted_flow
from headrace.flow.step.step_state import AtExperts
from headrace.flow.weights.expert_source import ExpertSource
from headrace.flow.weights.experts import ExpertCounts, Experts
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.opened import GenerationModel
from headrace.model.parts.parted_experts import Visit
from headrace.plan.value.plan import Plan
from headrace.terms.errors import PlanInfeasible, RunDirectoryError

EXPERTS, ATTENTION = "lora:rank=4,target_modules=o_proj+experts", "lora:rank=4"
STEPS = 2


def parted(adapter: str) -> Seams:
    return replace(seams_of(headrace.Options(adapter=adapter)), parted=True)


def together(count: int, in_round: int = 1, cached: int = 0, **how: Any) -> Callable[[Plan], Any]:
    """Return a change of plans: so many micro-batches are at a block's experts together, and so many experts stay in memory.
    `how` are other fields of `ExpertParts`.
    """

    def change(plan: Plan) -> Any:
        assert plan.experts is not None, "its experts are parts"
        return replace(plan.experts, together=count, in_round=in_round, cached=cached, **how)

    return change


def runs(path: Path, tmp_path: Path, adapter: str, change: dict[str, Any], **options: Any) -> None:
    """Assert that a run with experts as parts has the losses and adapters of one with whole blocks."""
    expected = train(path, tmp_path / "whole", steps=STEPS, adapter=adapter, adjust=SPLIT, **options)
    found = train(
        path, tmp_path / "parted", steps=STEPS, adapter=adapter, adjust=SPLIT | change, seams=parted(adapter), **options
    )
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])


@pytest.mark.wide
@pytest.mark.parametrize("dtype", sampled(["float32", "bfloat16"]))
@pytest.mark.parametrize("adapter", sampled([EXPERTS, ATTENTION]))
def test_experts_that_come_singly_train_as_whole_blocks(
    adapter: str, dtype: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    runs(model_dir("mixtral-aux", dtype), tmp_path, adapter, {"experts": together(2)}, compute_dtype=dtype)


PLACEMENTS: dict[str, dict[str, Any]] = {
    "SSD, plain": {
        "change": {"experts": together(3, 2), "stash_tiers": ("ssd",) * 4, "stash_slots": 2, "host_slots": 2, "prefetch": 1},
        "interpreter": "plain",
    },
    "a device": {"change": {"experts": together(2, 3)}, "device_memory": "1GiB"},
    "a device, graphs made again": {"change": {"experts": together(2, 3, remakes=True)}, "device_memory": "1GiB"},
    "SSD, plain, graphs made again": {
        "change": {
            "experts": together(3, remakes=True),
            "stash_tiers": ("ssd",) * 4,
            "stash_slots": 2,
            "host_slots": 2,
            "prefetch": 1,
        },
        "interpreter": "plain",
    },
    "a device, inputs on the SSD, a tree": {
        "change": {"experts": together(2), "stash_tiers": ("ssd",) * 4, "stash_slots": 2},
        "device_memory": "1GiB",
        "gradient_sum": "tree",
    },
}


@pytest.mark.wide
@pytest.mark.parametrize("placement", sampled(PLACEMENTS, ("a device, graphs made again",)))
@pytest.mark.parametrize("name", sampled(("gpt-oss", "deepseek"), ("gpt-oss",)))
def test_the_bits_are_the_same_wherever_things_live(
    name: str, placement: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    options = dict(PLACEMENTS[placement])
    runs(model_dir(name, "bfloat16"), tmp_path, EXPERTS, options.pop("change"), compute_dtype="bfloat16", **options)


@pytest.mark.deep
@pytest.mark.parametrize("place", ["SSD, plain, graphs made again", "a device, graphs made again"])
def test_a_graph_that_is_made_again_draws_the_same_numbers(place: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    options = dict(PLACEMENTS[place])
    adapter = "lora:rank=4,dropout=0.25"
    runs(model_dir("mixtral-aux", "bfloat16"), tmp_path, adapter, options.pop("change"), compute_dtype="bfloat16", **options)


@pytest.mark.wide
@pytest.mark.parametrize("remakes", [True, False])
def test_no_graph_waits_where_it_is_made_again(
    remakes: bool, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    own, own_backward = parted_flow._recomputed, Visit.backward

    def noting(*given: Any) -> Any:
        again, block = own(*given)
        graphs.append(weakref.ref(block.outputs[0]))
        return again, block

    def counting(visit: Visit, *given: Any) -> Any:
        alive.append(sum(graph() is not None for graph in graphs))
        return own_backward(visit, *given)

    monkeypatch.setattr(parted_flow, "_recomputed", noting)
    monkeypatch.setattr(Visit, "backward", counting)
    adjust = SPLIT | {"experts": together(3, remakes=remakes)}
    train(model_dir("many-experts"), tmp_path / "run", steps=1, adapter=EXPERTS, adjust=adjust, seams=parted(EXPERTS))
    assert max(alive) == (0 if remakes else 3)


def test_what_waits_in_a_block_has_one_copy_of_its_adapters() -> None:
    """Each micro-batch at the experts held one, which no plan counted."""
    waiting, trained = AtExperts(), torch.zeros(8)
    first = waiting.beside(1, trained, torch.device("meta"))
    assert waiting.beside(1, trained, torch.device("meta")) is first
    assert waiting.beside(2, trained, torch.device("meta")) is not first
    assert waiting.beside(1, trained, torch.device("meta")) is not first


@pytest.mark.wide
def test_a_run_goes_on_where_it_was_and_is_read_unfinished(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Evaluated, closed, resumed: as a run with whole blocks. Its files may not change meanwhile."""
    path, batches = model_dir("mixtral-aux", "bfloat16"), [batch_of(ROWS, LENGTH, seed) for seed in range(3)]
    more: dict[str, Any] = {
        "adapter": EXPERTS,
        "tokens_per_step": ROWS * LENGTH,
        "sequence_length": LENGTH,
        "learning_rate": 1e-2,
    }
    found = []
    for seams, run in ((None, tmp_path / "whole"), (parted(EXPERTS), tmp_path / "parted")):
        with Engine.open(path, headrace.Options(output=run, **more), seams=seams) as engine:
            assert (engine.plan is not None and engine.plan.experts is not None) == (seams is not None)
            said = [engine.step(batches[0]).loss, engine.evaluate(batches[2]).loss]
        with Engine.resume(run) as engine:
            said += [engine.step(batches[1]).loss, engine.evaluate(batches[2]).loss]
            said.append(engine.next_logits({"input_ids": batches[2]["input_ids"]}).tolist())
        found.append(said)
    assert found[0] == found[1]
    Generator.open(tmp_path / "parted", opened=GenerationModel.of_store).close()
    with touched(path), pytest.raises(RunDirectoryError, match="changed since the run began"):
        Engine.resume(tmp_path / "parted")


@pytest.mark.parametrize("stays", [True, False])
def test_an_expert_comes_once_in_a_run_or_for_a_group_and_not_if_nobody_wants_it(
    stays: bool, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, int]] = []
    groups: dict[tuple[int, int], Sequence[int]] = {}
    own = ExpertSource.read_expert

    def noting(source: ExpertSource, unit: int, number: int, into: Any) -> Any:
        read.append((unit, number))
        return own(source, unit, number, into)

    monkeypatch.setattr(ExpertSource, "read_expert", noting)

    ended = Experts.end_pass

    def ending(experts: Experts, *, idle: bool) -> None:
        groups.update(experts.wanted)
        ended(experts, idle=idle)

    monkeypatch.setattr(Experts, "end_pass", ending)
    few = {**batch_of(1, 4, 0)}
    options = headrace.Options(output=tmp_path / "run", adapter=EXPERTS, tokens_per_step=4, sequence_length=4)
    seams, change = parted(EXPERTS), together(1)
    adjust = None if stays else lambda plan: replace(plan, experts=change(plan))
    with Engine.open(model_dir("many-experts"), options, seams=seams, adjust_plan=adjust) as engine:
        engine.step(few)
    wanted = [(unit, expert) for (unit, _), experts in groups.items() for expert in experts]
    assert sorted(read) == sorted(set(wanted) if stays else 2 * wanted), "once in a run, or once forward and once backward"
    assert len(set(read)) <= 3 * 4 * 2, "of 48 experts, four tokens of three blocks choose at most two each"


@pytest.mark.wide
@pytest.mark.parametrize("in_round", [1, pytest.param(3, marks=pytest.mark.deep)])
def test_experts_that_stay_in_host_memory_are_read_once_in_a_run(
    in_round: int, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, int]] = []
    own = ExpertSource.read_expert

    def noting(source: ExpertSource, unit: int, number: int, into: Any) -> Any:
        read.append((unit, number))
        return own(source, unit, number, into)

    monkeypatch.setattr(ExpertSource, "read_expert", noting)
    runs(
        model_dir("mixtral-aux", "bfloat16"),
        tmp_path,
        EXPERTS,
        {"experts": together(1, in_round, cached=11)},
        compute_dtype="bfloat16",
        device_memory="1GiB",
    )
    times = sorted(read.count(expert) for expert in set(read))
    assert len(times) == 4 * 4, "each expert is wanted by some token"
    assert times.count(1) == 11
    assert min(times[11:]) >= 2 * STEPS, "the others are read in each pass"


@pytest.mark.parametrize("policy", sampled(("last-used", "most-wanted", "keep-all"), ("last-used",)))
def test_experts_that_stay_on_the_device_by_a_policy_change_no_bits(
    policy: str, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counter[str]()
    own = ExpertSource.make_expert

    def noting(source: ExpertSource, *more: Any) -> None:
        counts["made"] += 1
        own(source, *more)

    ended = Experts.end_pass

    def ending(experts: Experts, *, idle: bool) -> None:
        counts.update(wanted=experts.counts.wanted, found=experts.counts.found)
        ended(experts, idle=idle)
        experts.counts = ExpertCounts()

    monkeypatch.setattr(ExpertSource, "make_expert", noting)
    monkeypatch.setattr(Experts, "end_pass", ending)
    change = together(1, 2, cached=5, policy=policy, on_device=7, device_policy=policy)
    options = {"compute_dtype": "bfloat16", "device_memory": "1GiB"}
    runs(model_dir("mixtral-aux", "bfloat16"), tmp_path, EXPERTS, {"experts": change}, **options)
    assert 0 < counts["made"] < counts["wanted"], "some are there"
    assert 0 < counts["found"] < counts["wanted"], "these are not read, either"


@pytest.mark.deep
def test_experts_stay_in_host_memory_where_there_is_room(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    step = {"tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH}
    options = headrace.Options(output=tmp_path, adapter=EXPERTS, host_memory="4GiB", **step)
    with Engine.open(model_dir("many-experts", "bfloat16"), options, seams=parted(EXPERTS)) as engine:
        assert engine.plan is not None
        assert engine.plan.experts is not None
        assert engine.plan.experts.cached == 48


@pytest.mark.deep
def test_experts_become_parts_where_whole_blocks_have_no_room(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    def opened(device_bytes: int) -> Plan:
        options = headrace.Options(
            output=tmp_path / str(device_bytes),
            adapter=EXPERTS,
            host_memory="4GiB",
            device_memory=device_bytes,
            tokens_per_step=ROWS * LENGTH,
            sequence_length=LENGTH,
        )
        with Engine.open(model_dir("many-experts"), options) as engine:
            assert engine.plan is not None
            return engine.plan

    assert opened(1 << 30).experts is None
    with pytest.raises(PlanInfeasible) as refusal:
        opened(1)
    assert refusal.value.tier == "device"
    plan = opened(refusal.value.needed_bytes)
    assert plan.experts is not None
    assert any("experts come one at a time" in note for note in plan.results.notes)
