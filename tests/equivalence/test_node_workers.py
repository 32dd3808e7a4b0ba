"""What a node knows of its workers: what their lanes did, how fast each is, and what they find the loss of rows to be."""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crew import crew, node_options, weights_of
from numpy.typing import NDArray
from plain import LENGTH, ROWS, SPLIT, batch_of
from short_run import short_run
from tiers import sampled

from headrace.apps.pages.views import lane_heading, lane_place
from headrace.engine.seams import Seams
from headrace.engine.trainer import Engine
from headrace.flow.step import compute, update
from headrace.flow.step.step import HANDLERS
from headrace.flow.step.step_state import StepState
from headrace.peers.meet import lane_diary
from headrace.peers.node.node import NodeEngine
from headrace.peers.node.site import NodeSite
from headrace.plan.value.plan import Plan
from headrace.terms.errors import ConfigError
from headrace.terms.events import Event, OpDone
from headrace.terms.lanes import Lane, Peer, lane_of_peer, split_lane
from headrace.terms.program import Op, Verb

NUM_BLOCKS = 4
CLIPPED: dict[str, Any] = {"max_grad_norm": 0.5, "compute_dtype": "float32"}


# Dropout of workers that are threads of one process would draw from one generator.
@pytest.mark.wide
@pytest.mark.parametrize(("workers", "model"), sampled([(1, "gpt2-dropout"), (2, "llama")], [(1, "gpt2-dropout")]))
def test_held_out_rows_are_scored_between_steps_and_change_nothing(
    workers: int, model: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path, plans, expected = model_dir(model), list[Plan](), list[float]()
    batches, held_out = [batch_of(4, LENGTH, seed) for seed in range(2)], batch_of(4, LENGTH, 99)
    split = {**SPLIT, "num_micro_batches": 2, "loss_chunk_tokens": 2 * LENGTH}

    def adjusted(engine: Engine) -> None:
        plans.append(engine.plan)
        expected.append(engine.evaluate(held_out).loss)

    _, weights = short_run(path, tmp_path / "local", batches, adjust=split, inspect=adjusted, **CLIPPED)
    with crew(workers) as made:
        options = node_options(tmp_path / "node", batches, **CLIPPED)
        with NodeEngine.open(path, options, plan=plans[0], seams=Seams(workers=made.crowd)) as engine:
            losses = [engine.evaluate(held_out).loss]
            for batch in batches:
                engine.step(batch)
                losses.append(engine.evaluate(held_out).loss)
                assert engine.evaluate(held_out).loss == losses[-1]
            engine.save_pretrained(out := tmp_path / "out")
            with pytest.raises(ConfigError, match="workers send losses, not logits"):
                engine.next_logits(held_out)
    assert losses[-1] == pytest.approx(expected[0], rel=1e-6)
    assert len(set(losses)) == 3, "each step changed it"
    found = weights_of(out)
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.wide
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_held_out_rows_are_scored_by_two_workers_and_a_model_is_kept_between_steps(
    rows: int, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """As a run evaluates whose last batch is small: each worker gets rows, and the loss is that of one machine."""
    path, plans, expected = model_dir("llama"), list[Plan](), list[float]()
    batches, held_out = [batch_of(4, LENGTH, seed) for seed in range(2)], batch_of(rows, LENGTH, 99, padded=rows == 2)
    split = {**SPLIT, "num_micro_batches": 2, "loss_chunk_tokens": 2 * LENGTH}

    def adjusted(engine: Engine) -> None:
        plans.append(engine.plan)
        expected.append(engine.evaluate(held_out).loss)

    _, weights = short_run(path, tmp_path / "local", batches, adjust=split, inspect=adjusted, **CLIPPED)
    with crew(2) as made:
        options = node_options(tmp_path / "node", batches, **CLIPPED)
        with NodeEngine.open(path, options, plan=plans[0], seams=Seams(workers=made.crowd)) as engine:
            for number, batch in enumerate(batches):
                engine.step(batch)
                found = engine.evaluate(held_out)
                engine.save_pretrained(tmp_path / f"kept-{number}")
            engine.save_pretrained(out := tmp_path / "out")
    assert found.tokens == int((held_out["labels"][:, 1:] != -100).sum())
    assert found.loss == pytest.approx(expected[0], rel=1e-6)
    assert all(torch.equal(weights_of(each)[name], weights[name]) for each in (out, tmp_path / "kept-1") for name in weights)


@pytest.mark.wide
def test_micro_batches_of_a_tree_are_dealt_by_speed(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two workers the first is slow: it gets one micro-batch of three from the second step on, and the bits stay."""
    path, plans = model_dir("llama"), list[Plan]()
    batches = [batch_of(ROWS, LENGTH, seed) for seed in range(3)]
    how = {**CLIPPED, "gradient_sum": "tree"}
    _, weights = short_run(
        path, tmp_path / "local", batches, adjust=SPLIT, inspect=lambda engine: plans.append(engine.plan), **how
    )

    def slow_forward(state: StepState, op: Op) -> None:
        compute.forward(state, op)
        site = state.parts.site
        if isinstance(site, NodeSite) and site.rank == 1:
            time.sleep(0.2)

    monkeypatch.setitem(HANDLERS, Verb.FORWARD, slow_forward)
    with crew(2) as made:
        options = node_options(tmp_path / "node", batches, **how)
        with NodeEngine.open(path, options, plan=plans[0], seams=Seams(workers=made.crowd)) as engine:
            shares = []
            for batch in batches:
                engine.step(batch)
                shares.append({rank: len(share) for rank, share in made.crowd.shares.items()})
            engine.save_pretrained(out := tmp_path / "out")
    assert shares[0] == {1: 2, 2: 1}, "evenly, as far as branches go"
    assert shares[-1] == {1: 1, 2: 2}
    found = weights_of(out)
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.wide
def test_a_worker_whose_scratch_folder_was_cleared_ends_well(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /tmp is cleared of what is old, or by somebody tidy: nothing in it was durable."""
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with crew(1) as made:
        options = node_options(tmp_path / "node", [batch_of(4, LENGTH, 0)])
        with NodeEngine.open(model_dir("llama"), options, seams=Seams(workers=made.crowd)) as engine:
            engine.step(batch_of(4, LENGTH, 0))
            cleared = list(scratch.glob("headrace-worker-*"))
            assert cleared
            for folder in cleared:
                shutil.rmtree(folder)


@pytest.mark.parametrize(
    "policy", sampled([{"max_grad_norm": None}, {"max_grad_norm": 0.5}], [{"max_grad_norm": None}]), ids=str
)
def test_a_gradient_of_one_worker_that_is_not_finite_skips_the_step_for_all(
    policy: dict[str, Any], model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is changed, and the run goes on as if that step had not been."""
    path, (first, second) = model_dir("llama", "bfloat16"), [batch_of(4, LENGTH, seed) for seed in range(2)]
    push, poisoned = NodeSite.push, threading.Event()

    def push_poisoned(site: NodeSite, unit: int, gradient: NDArray[Any]) -> None:
        if poisoned.is_set() and (site.rank, unit) == (2, 2):
            gradient[5] = np.nan
        push(site, unit, gradient)

    monkeypatch.setattr(NodeSite, "push", push_poisoned)
    ends = []
    for name, batches in (("disturbed", (first, second, second)), ("as if", (first, second))):
        with crew(2) as made:
            options = node_options(tmp_path / name, [first], **policy)
            with NodeEngine.open(path, options, seams=Seams(workers=made.crowd)) as engine:
                results = []
                for number, batch in enumerate(batches):
                    if (name, number) == ("disturbed", 1):
                        poisoned.set()
                    results.append(engine.step(batch))
                    poisoned.clear()
                engine.save_pretrained(out := tmp_path / f"{name}-out")
        assert [result.skipped is not None for result in results] == [
            name == "disturbed" and each == 1 for each in range(len(batches))
        ]
        assert results[-1].loss == results[1].loss, "a skipped step changes no worker's weights"
        ends.append(weights_of(out))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])


def test_each_worker_tells_what_its_lanes_did(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    told, batches = list[Event](), [batch_of(4, LENGTH, seed) for seed in range(2)]
    with crew(2) as made:
        options = node_options(tmp_path / "node", batches)
        with NodeEngine.open(model_dir("llama"), options, seams=Seams(workers=made.crowd), sink=told.append) as engine:
            for batch in batches:
                begin = time.perf_counter()
                engine.step(batch)
    ops = [event for event in told if isinstance(event, OpDone)]
    for rank in (1, 2):
        mine = [op for op in ops if op.lane == lane_of_peer(Peer.WORKER, rank, Lane.COMPUTE) and op.step == 1]
        assert {op.verb for op in mine} >= {"prologue", "forward", "epilogue", "backward"}
        assert all(begin <= op.start_seconds <= op.stop_seconds <= time.perf_counter() for op in mine), "on the node's clock"
        assert [op.unit for op in sorted(mine, key=lambda op: op.start_seconds) if op.verb == "forward"] == [1, 2, 3, 4]
    assert {split_lane(op.lane)[:2] for op in ops} == {(None, 0), (Peer.WORKER, 1), (Peer.WORKER, 2)}


@pytest.mark.wide
def test_a_block_is_updated_at_the_node_while_a_worker_computes_the_one_below(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker ends backward of a block only once the node has updated the one above: a node that waits for the whole gradient
    would wait for ever.
    """
    updated, batch = [threading.Event() for _ in range(8)], batch_of(4, LENGTH, 1)

    def noted_update(state: StepState, op: Op) -> None:
        update.update(state, op)
        updated[op.unit].set()

    def waiting_backward(state: StepState, op: Op) -> None:
        compute.backward(state, op)
        if op.unit < NUM_BLOCKS:
            assert updated[op.unit + 1].wait(60), f"block {op.unit + 1} waits for the one below"

    monkeypatch.setitem(HANDLERS, Verb.UPDATE, noted_update)
    monkeypatch.setitem(HANDLERS, Verb.BACKWARD, waiting_backward)
    with crew(1) as made:
        options = node_options(tmp_path / "node", [batch])
        with NodeEngine.open(model_dir("llama"), options, seams=Seams(workers=made.crowd)) as engine:
            assert engine.plan.num_blocks == NUM_BLOCKS
            engine.step(batch)
            engine.flush()
    assert all(each.is_set() for each in updated[1 : NUM_BLOCKS + 1])


def test_what_is_told_of_a_step_is_bounded() -> None:
    diary = lane_diary.LaneDiary(lambda event: None)
    diary.begin()
    for number in range(3000):
        for lane, verb in ((Lane.COMPUTE, "forward"), (Lane.NIC_UP, "push")):
            start = number * 1e-3
            diary(
                OpDone(
                    step=number // 1000, label="", verb=verb, lane=lane, unit=1, micro=0, chunk=-1,
                    start_seconds=start, stop_seconds=start + 5e-4, bytes=7,
                )
            )  # fmt: skip
    told = diary.told()
    assert len(told["ops"]) <= lane_diary.MAX_LANE_ROWS_PER_STEP
    ops = list(lane_diary.ops_of(told["ops"], step=2, peer=Peer.WORKER, number=2, begin_seconds=0.0))
    assert sum(op.bytes for op in ops) == 2 * 3000 * 7
    # Nobody waits for what belongs to the step before the last.
    assert [sum(op.bytes for op in ops if op.step == step) for step in range(3)] == [0, 2 * 2000 * 7, 2 * 1000 * 7]
    assert told["compute_seconds"] == pytest.approx(1.5)
    assert diary.told()["ops"] == []


def test_lanes_of_workers_have_names_and_places_of_their_own() -> None:
    of_two = [lane_of_peer(Peer.WORKER, 2, lane) for lane in (Lane.NIC_UP, "new")]
    lanes = [lane_of_peer(Peer.WORKER, 10, Lane.COMPUTE), *of_two, Lane.NIC_UP, "other"]
    assert sorted(lanes, key=lane_place) == [Lane.NIC_UP, "other", *lanes[1:3], lanes[0]]
    assert lane_heading(lanes[0], lanes) == "Worker 10: Compute"
    assert lane_heading(Lane.COMPUTE, lanes) == "Compute", "a node is no worker"
    assert lane_heading("worker a: b") == "worker a: b"
