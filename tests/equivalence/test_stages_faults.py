"""A stage that is lost at any message of a step: both go on from the last commit, to the bytes of an undisturbed run."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import node_options
from plain import LENGTH, batch_of
from ranks import staged_run
from tiers import sampled
from torch.distributed import HashStore

from headrace.engine.seams import Seams
from headrace.peers.meet.lane import Channel
from headrace.peers.meet.ranks import Ranks
from headrace.peers.ranks.sharded import join_as_rank
from headrace.peers.stages.line import LANES, Line
from headrace.peers.stages.staged import StagedEngine
from headrace.terms.errors import PeerLost, StepFailed

STRIDE = 5
BATCHES = [batch_of(8, LENGTH, seed) for seed in range(3)]


class Cut:
    """Ends all lanes of a stage at its message number `at`, sent or received, once it is armed."""

    def __init__(self, stage: int, at: int) -> None:
        self.stage, self.at, self.count, self.armed = stage, at, 0, False
        self.of: dict[int, Ranks] = {}
        self._lock = threading.Lock()

    def tick(self, rank: int) -> None:
        with self._lock:
            if not (self.armed and rank == self.stage):
                return
            self.count += 1
            if self.count <= self.at:
                return
        self.of[rank].end("cut off")
        raise PeerLost("cut off")

    @contextmanager
    def installed(self) -> Iterator[None]:
        send, receive = Channel.send, Channel.receive

        def sent(lane: Channel, data: Any, to: int) -> None:
            self.tick(lane.rank)
            send(lane, data, to)

        def received(lane: Channel, into: Any, source: int) -> float:
            self.tick(lane.rank)
            return receive(lane, into, source)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Channel, "send", sent)
            patch.setattr(Channel, "receive", received)
            yield


def run_until_cut(path: Path, output: Path, cut: Cut, **options: Any) -> None:
    """Begin a run in two stages, which ends where it is cut, or after all batches."""
    store = HashStore()

    def meet(stage: int) -> Line:
        cut.of[stage] = Ranks(store, stage, 2, host="127.0.0.1", lanes=LANES)
        return Line(cut.of[stage])

    def follow() -> None:
        folder = output.parent / f"{output.name}-rank-1"
        line = meet(1)
        with (
            suppress(PeerLost, StepFailed),
            join_as_rank(line, lambda told: folder, lambda event: None, StagedEngine) as engine,
        ):
            engine.follow()
        line.ranks.close()

    other = threading.Thread(target=follow, daemon=True)
    other.start()
    line = meet(0)
    opened = StagedEngine.open(path, node_options(output, BATCHES, **options), seams=Seams(fleet=line))
    cut.armed = True
    with suppress(PeerLost, StepFailed), opened as engine:
        for batch in BATCHES:
            engine.step(batch)
    line.ranks.close()
    other.join(100)
    assert not other.is_alive(), "a stage whose neighbour is lost ends"


@pytest.mark.wide
@pytest.mark.timeout(280)
@pytest.mark.parametrize(("stage", "at"), sampled([(stage, at) for stage in (0, 1) for at in range(0, 60, STRIDE)], [(1, 10)]))
def test_a_stage_lost_at_any_message_goes_on_to_the_same_bytes(
    stage: int, at: int, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path, options = model_dir("llama-tied", "bfloat16"), {"max_grad_norm": 0.5}
    _, want = staged_run(path, tmp_path / "whole", BATCHES, 2, **options)
    cut = Cut(stage, at)
    with cut.installed():
        run_until_cut(path, tmp_path / "run", cut, **options)
    assert cut.count > at, "there were messages to be cut"
    done = list[int]()

    def go_on(engine: StagedEngine) -> None:
        done.append(engine.step_index)
        for batch in BATCHES[engine.step_index :]:
            engine.step(batch)

    _, found = staged_run(path, tmp_path / "run", [], 2, resume=True, drive=go_on)
    assert 0 <= done[0] <= len(BATCHES)
    assert all(torch.equal(found[name], values) for name, values in want.items())
