"""A worker is lost before any operation of its step: the others are told, whoever waits for whom; the node goes on from the
last committed step when another worker has come, and ends with the weights of a run that nobody disturbed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, crew, node_options, weights_of
from plain import LENGTH, ROWS, batch_of
from tiers import sampled

from headrace.engine.seams import Seams
from headrace.flow.step.step import HANDLERS
from headrace.flow.step.step_state import StepState
from headrace.peers.meet import exchange
from headrace.peers.meet.same_run import lost_peer
from headrace.peers.node.node import NodeEngine
from headrace.peers.node.site import NodeSite
from headrace.terms.errors import PeerLost, StepFailed
from headrace.terms.program import Op

BATCHES = [batch_of(ROWS, LENGTH, seed) for seed in range(3)]
POLICIES: dict[str, dict[str, Any]] = {"immediate": {"max_grad_norm": None}, "deferred": {"max_grad_norm": 0.5}}
WORKERS, NEVER = 2, 1 << 30


class Fate:
    """Counts operations of the first worker; before number `moment` all of its connections break, as those of one killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moment, self.count = NEVER, 0
        for verb, handler in HANDLERS.items():
            monkeypatch.setitem(HANDLERS, verb, self._watched(handler))

    def _watched(self, handler: Callable[[StepState, Op], None]) -> Callable[[StepState, Op], None]:
        def perform(state: StepState, op: Op) -> None:
            site = state.parts.site
            if isinstance(site, NodeSite) and site.rank == 1:
                self.count += 1
                if self.count == self.moment:
                    site._generation.close()
            handler(state, op)

        return perform


def run(path: Path, output: Path, made: Crew, **options: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Run, and go on after each loss; return the final weights, and how many losses there were."""
    seams, losses, out = Seams(workers=made.crowd), 0, output.with_name(f"{output.name}-out")
    engine = NodeEngine.open(path, node_options(output, BATCHES, **options), seams=seams)
    while True:
        try:
            with engine:
                while engine.step_index < len(BATCHES):
                    engine.step(BATCHES[engine.step_index])
                engine.save_pretrained(out)
            return weights_of(out), losses
        except (PeerLost, StepFailed) as error:
            if lost_peer(error) is None:
                raise
        losses += 1
        made.crowd.part("it went on")
        engine = NodeEngine.resume(output, seams=seams, verify=False)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("policy", "share"), sampled([("immediate", 0.5), ("immediate", None), ("deferred", None)], [("immediate", 0.5)])
)
@pytest.mark.timeout(1200)
def test_all_go_on_after_a_worker_was_lost(
    policy: str, share: float | None, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "PIECE_ELEMENTS", 1 << 12)  # several rounds for each unit
    path, fate = model_dir("llama", "bfloat16"), Fate(monkeypatch)
    with crew(WORKERS) as made:
        expected, losses = run(path, tmp_path / "whole", made, **POLICIES[policy])
        assert losses == 0
        operations = fate.count
        # All of the second step, if not one moment of it.
        third = operations // len(BATCHES)
        moments = range(third, 2 * third + 1) if share is None else [third + int(share * third)]
        for moment in moments:
            made.crowd.part("the next run begins")
            fate.moment, fate.count = moment, 0
            found, losses = run(path, tmp_path / str(moment), made, **POLICIES[policy])
            assert losses == 1, f"lost before operation {moment} of {operations}"
            assert all(torch.equal(found[name], expected[name]) for name in expected), f"operation {moment} of {operations}"
