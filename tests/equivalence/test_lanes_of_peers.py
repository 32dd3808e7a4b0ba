"""Ranks and stages tell the first of them what their lanes did, on its clock, and the report page has rows for each.

Run: pytest tests/equivalence/test_lanes_of_peers.py
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plain import LENGTH, SPLIT, batch_of
from ranks import ranks_run, staged_run

from headrace.apps import write_report
from headrace.report import LanesFile, metrics
from headrace.runs.counted import for_people
from headrace.terms.events import NO_STEP, Event, OpDone
from headrace.terms.lanes import Lane, Peer, lane_of_peer, split_lane
from headrace.terms.program import Verb

STEPS = 3
# What each of them does in every step.
OF_ALL = {Verb.FORWARD, Verb.BACKWARD, Verb.UPDATE, Verb.WRITE_STATES}
OF = {Peer.RANK: OF_ALL | {Verb.PROLOGUE, Verb.EPILOGUE, Verb.GATHER, Verb.SCATTER}, Peer.STAGE: OF_ALL | {Verb.EPILOGUE}}


@pytest.mark.wide
@pytest.mark.parametrize("peer", [Peer.RANK, Peer.STAGE])
def test_each_tells_what_its_lanes_did(peer: Peer, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    told, lanes = list[Event](), LanesFile(tmp_path)
    to_people = for_people(lanes)

    def sink(event: Event) -> None:
        told.append(event)
        to_people(event)

    batches, begin = [batch_of(4, LENGTH, seed) for seed in range(STEPS)], time.perf_counter()
    given: dict[str, Any] = {"adjust": {**SPLIT, "num_micro_batches": 4}, "sink": sink}
    path = model_dir("llama", "bfloat16")
    if peer is Peer.RANK:
        ranks_run(path, tmp_path / "run", batches, 2, gradient_sum="tree", drive=_evaluate(batches[0]), **given)
    else:
        shares = list[Any]()

        def drive(engine: Any) -> None:
            engine.evaluate(batches[0])
            shares.append(engine._line.stage_shares.to_json(4))

        staged_run(path, tmp_path / "run", batches, 2, drive=drive, **given)
        assert 0 < min(shares[0]["busy_shares"]) <= shares[0]["utilisation"] < 1
        assert shares[0]["transfer_seconds"] > 0
        assert 0 < shares[0]["bound"] < 1
    end = time.perf_counter()
    lanes.close()
    ops = [event for event in told if isinstance(event, OpDone)]
    assert {split_lane(op.lane)[:2] for op in ops} == {(None, 0), (peer, 1)}
    assert all(begin <= op.start_seconds <= op.stop_seconds <= end for op in ops), "on the clock of the first"
    theirs = [op for op in ops if op.lane.startswith(peer)]
    for step in range(STEPS - 1):
        assert {op.verb for op in theirs if op.step == step} >= OF[peer]
    assert {op.verb for op in theirs if op.step == NO_STEP} >= {Verb.FORWARD, Verb.SCORE}, "of the evaluation"
    updates = {op.unit for op in theirs if op.step == 0 and op.verb == Verb.UPDATE}
    own = {op.unit for op in ops if op.lane == Lane.UPDATE and op.step == 0 and op.verb == Verb.UPDATE}
    assert updates == own if peer is Peer.RANK else not updates & own, "ranks share out every unit, stages have their own"
    lines = metrics.read_metrics(tmp_path / "lanes.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines[1:-1]:
        assert line["lanes"][lane_of_peer(peer, 1, Lane.COMPUTE)]["busy_seconds"] > 0
    page = write_report(tmp_path).read_text(encoding="utf-8")
    for number in range(2):
        assert f"{peer.capitalize()} {number}: Compute" in page
        assert f"{peer.capitalize()} {number}: SSD writes" in page


def _evaluate(batch: Any) -> Callable[[Any], None]:
    return lambda engine: engine.evaluate(batch)
