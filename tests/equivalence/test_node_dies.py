"""A node's power is cut between any two writes of its store: it goes on from the last committed step or the next one, never
from something between them, and ends with the weights of a run that nobody disturbed.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, crew, node_options, weights_of
from plain import LENGTH, ROWS, batch_of
from tiers import sampled

from headrace.engine.seams import Seams
from headrace.peers.node.node import NodeEngine
from headrace.store import StateStore
from headrace.terms.errors import HeadraceError
from headrace.testing import PowerSupply

BATCHES = [batch_of(ROWS, LENGTH, seed) for seed in range(3)]
POLICIES: dict[str, dict[str, Any]] = {"immediate": {"max_grad_norm": None}, "deferred": {"max_grad_norm": 0.5}}
NEVER = 1 << 30


@pytest.fixture
def supply(monkeypatch: pytest.MonkeyPatch) -> PowerSupply:
    """The power supply of the node's store, and of nothing else in this process."""
    supply = PowerSupply(NEVER, seed=1)

    class Store(StateStore):
        @classmethod
        def create(cls, *arguments: Any, **more: Any) -> StateStore:
            return super().create(*arguments, open_file=supply.open_file, **more)

        @classmethod
        def open(cls, *arguments: Any, **more: Any) -> StateStore:
            return super().open(*arguments, open_file=supply.open_file, **more)

    monkeypatch.setattr("headrace.engine.subject.StateStore", Store)
    monkeypatch.setattr("headrace.engine.beginning.StateStore", Store)
    return supply


def run(engine: NodeEngine, out: Path) -> None:
    """Take the steps that are left, and export; a step knows its batch by its number."""
    with engine:
        while engine.step_index < len(BATCHES):
            engine.step(BATCHES[engine.step_index])
        engine.save_pretrained(out)


def walk(
    path: Path, folder: Path, made: Crew, supply: PowerSupply, policy: str, cut_at: int
) -> tuple[int, int, dict[str, torch.Tensor]]:
    """Run, with the power cut at a write or sync of the steps, and go on; return the writes and syncs that steps took, the
    step that was found, and the final weights.
    """
    output, out = folder / f"{policy}-{cut_at}", folder / f"{policy}-{cut_at}-out"
    seams = Seams(workers=made.crowd)
    supply.cut_at, supply.calls = NEVER, 0
    supply.files.clear()
    engine = NodeEngine.open(path, node_options(output, BATCHES, **POLICIES[policy]), seams=seams)
    supply.calls, supply.cut_at = 0, cut_at
    with suppress(HeadraceError):
        run(engine, out)
    calls, found = supply.calls, engine.step_index
    if calls <= cut_at:
        return calls, found, weights_of(out)
    supply.cut()
    made.crowd.part("the node's power is gone")
    supply.cut_at, supply.calls = NEVER, 0
    supply.files.clear()
    engine = NodeEngine.resume(output, seams=seams)  # verifies all that is committed
    found = engine.step_index
    run(engine, out)
    return calls, found, weights_of(out)


@pytest.mark.wide
@pytest.mark.parametrize("policy", sampled(POLICIES, ["deferred"]))
@pytest.mark.parametrize("share", [0.45, pytest.param(None, marks=pytest.mark.deep)], ids=["somewhere", "everywhere"])
def test_the_node_goes_on_from_a_whole_step(
    policy: str, share: float | None, supply: PowerSupply, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path = model_dir("llama", "bfloat16")
    with crew() as made:
        calls, _, expected = walk(path, tmp_path, made, supply, policy, NEVER)
        moments = range(calls) if share is None else [14, int(share * calls)]
        seen = set()
        for moment in moments:
            _, found, weights = walk(path, tmp_path, made, supply, policy, moment)
            seen.add(found)
            assert all(torch.equal(weights[name], expected[name]) for name in expected), f"cut at {moment} of {calls}"
    assert share is not None or seen >= {0, 1, 2}, "cuts before and after commits"
