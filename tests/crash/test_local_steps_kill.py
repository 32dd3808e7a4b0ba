"""Learners and their node are killed: every lot of rows is merged or named once, and the journal of merges, replayed by others
whom nobody disturbs, ends with the same bytes.
"""

import json
import random
import time
from pathlib import Path
from typing import Any

import node_processes
import pytest
from node_machines import Machines, kill
from tiers import sampled

pytestmark = pytest.mark.process

RUN: dict[str, Any] = {"local_steps": 4, "quorum": 2, "grace": 60}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    node_processes.write_model(folder)
    return folder


def hire(machines: Machines, name: str) -> int:
    """Start a learner with a directory of that name, also again; return its place among the processes."""
    ssd = machines.output.with_name(f"{machines.output.name}-{name}")
    ssd.mkdir(exist_ok=True)
    machines.hire(ssd=str(ssd))
    return len(machines.workers) - 1


def lines_of(machines: Machines) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (machines.output / "merges.jsonl").read_text().splitlines()]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("travel", sampled(["bfloat16", "int8"], ["bfloat16"]))
def test_learners_and_the_node_are_killed_and_the_journal_replays_to_the_same_bytes(travel: str, place: Path) -> None:
    run, dice = {**RUN, "exchange_dtype": travel, "max_steps": 24}, random.Random(5)
    machines = Machines(place, f"killed-{travel}", 1, "deferred", **run)
    first, _ = hire(machines, "a"), hire(machines, "b")
    for merges, victim in ((1, "learner"), (2, "node"), (3, "both")):
        machines.wait_for_step(merges)
        time.sleep(dice.random() * 0.3)
        if victim != "node":
            kill(machines.workers[first])
        if victim != "learner":
            kill(machines.node)
            machines.start_node()
        if victim != "node":
            first = hire(machines, "a")
    ended = machines.finish()
    lines = lines_of(machines)
    told = [each["lot"] for line in lines for each in (*line["lots"], *line["lost"])]
    assert sorted(told) == list(range(len(told)))
    assert [line["version"] for line in lines if line["lots"]] == [1, 2, 3, 4, 5, 6]
    again = Machines(place, f"again-{travel}", 1, "deferred", replay=str(machines.output / "merges.jsonl"), **run)
    learners = {each["learner"] for line in lines for each in line["lots"]}
    for number in sorted(learners):
        hire(again, str(number))
    assert again.finish() == ended
    assert [line["lots"] for line in lines_of(again) if line["lots"]] == [line["lots"] for line in lines if line["lots"]]
