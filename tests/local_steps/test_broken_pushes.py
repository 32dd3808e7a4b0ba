"""Broken pushes over loopback: each is refused by name, their learner is told why it gets no more, nothing is merged."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from test_learners import Learners

from headrace.peers.local_steps import learner
from headrace.peers.meet.address import Address
from headrace.peers.meet.lane import Channel
from headrace.peers.node.run import serve
from headrace.runs.protocols import NoDisplay
from headrace.terms.errors import ConfigError
from headrace.terms.options.run_options import NodeOptions

Units = Iterator[NDArray[Any]]
# Each becomes another push than the node expects.
BREAKS: dict[str, Callable[[Units], Units]] = {
    "half of each unit": lambda units: (unit[: unit.size // 2].copy() for unit in units),
    "another type": lambda units: (unit.astype(np.float64) for unit in units),
    "another shape": lambda units: (unit.reshape(1, -1) for unit in units),
    "twice each unit": lambda units: (np.concatenate([unit, unit]) for unit in units),
    "half of the units": lambda units: iter(list(units)[:2]),
    "a unit more": lambda units: iter([*(found := list(units)), found[-1]]),
}


class _Told(NoDisplay):
    def __init__(self) -> None:
        self.lines = list[str]()

    def say(self, text: str) -> None:
        self.lines.append(text)


def _run(config: NodeOptions, folder: Path, breaks: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """Run a node with a learner that sends each push broken in another way, and then with one that works."""
    folder.mkdir()
    broken, works, told, left = Learners(folder / "broken", 1), Learners(folder / "works", 1), _Told(), list(breaks)
    for each in ("broken", "works"):
        (folder / each).mkdir()
    real = learner.send_units

    def send(lane: Channel, to: int, units: Units) -> None:
        real(lane, to, BREAKS[left.pop(0)](units) if left else units)

    def hire(address: Address) -> None:
        broken.hire(address)
        threading.Thread(target=lambda: (broken.wait(), works.hire(address)), daemon=True).start()

    with monkeypatch.context() as patch:
        patch.setattr(learner, "send_units", send)
        finished = serve(config, display=told, silence_seconds=20.0, listening=hire)
        works.join()
    (error,) = broken.errors
    assert isinstance(error, ConfigError)
    assert "this learner gets no more rows: 3 pushes of learner 1 were thrown out, the last because " in str(error)
    assert not left
    return finished, told.lines


@pytest.mark.wide
def test_nothing_of_a_broken_push_is_merged(
    tmp_path: Path, options: Callable[..., NodeOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was broken, the other learner's lots alone make the same bits."""
    found = []
    for number, breaks in enumerate((list(BREAKS)[:3], list(BREAKS)[3:])):
        config = options(tmp_path / f"run-{number}", max_steps=3, local_steps=1)
        finished, lines = _run(config, tmp_path / f"learners-{number}", breaks, monkeypatch)
        journal = [json.loads(line) for line in (finished.run_directory / "merges.jsonl").read_text().splitlines()]
        lost = [each for line in journal for each in line["lost"]]
        assert [each["learner"] for each in lost[:3]] == [1, 1, 1]
        assert {lot["learner"] for line in journal for lot in line["lots"]} == {2}
        for each in lost[:3]:
            assert "expected" in each["reason"], each
            assert any(f"lot {each['lot']} of learner 1 is thrown out: {each['reason']}" in line for line in lines)
        assert sum("it gets no more rows" in line for line in lines) == 1
        found.append(load_file(next(finished.final.glob("*.safetensors"))))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
