"""A node or a worker is killed, or stopped, in the middle of a run: spares take over, the same node goes on, and the final
weights are, byte for byte, those of a run that nobody disturbed. No hang: each wait here has an end.
"""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import node_processes
import pytest
from node_machines import PROCESSES, Machines, kill
from tiers import sampled

from headrace.store.manifest import MANIFEST_NAME

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("node")
    node_processes.write_model(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> Any:
    """Return the weights of a run that nobody disturbed, by policy, number of workers, and steps."""
    known: dict[tuple[str, int, int], bytes] = {}

    def weights(policy: str, workers: int, steps: int = node_processes.STEPS) -> bytes:
        if (policy, workers, steps) not in known:
            machines = Machines(place, f"whole-{policy}-{workers}-{steps}", workers, policy, max_steps=steps)
            machines.hire(workers)
            known[policy, workers, steps] = machines.finish()
            assert all(process.exitcode == 0 for process in machines.workers), "workers end well"
        return known[policy, workers, steps]

    return weights


@pytest.mark.parametrize(
    ("policy", "workers"), sampled([("deferred", 1), ("immediate", 1), ("deferred", 2)], [("deferred", 1)])
)
def test_workers_and_the_node_are_killed(policy: str, workers: int, place: Path, undisturbed: Any) -> None:
    steps = 24  # so many that the last one that is killed has not ended before, however late the kill comes
    machines, dice = Machines(place, f"killed-{policy}-{workers}", workers, policy, max_steps=steps), random.Random(7)
    machines.hire(workers + 1)  # a spare, too
    machines.wait_for_step(2)
    time.sleep(dice.random() * 0.1)
    kill(machines.workers[0])
    machines.hire()
    machines.wait_for_step(5)
    time.sleep(dice.random() * 0.1)
    kill(machines.node)
    machines.start_node()  # on the same port: workers wait for it
    machines.wait_for_step(8)
    time.sleep(dice.random() * 0.1)
    kill(machines.workers[1])
    assert machines.finish() == undisturbed(policy, workers, steps)
    left = [process.exitcode for process in machines.workers if process.exitcode != -signal.SIGKILL]
    assert left == [0] * workers, "spares end well, too"
    assert not list(machines.scratch.iterdir()), "what the killed left went with the next worker"


@pytest.mark.deep
def test_a_worker_that_is_stopped_is_replaced_and_may_come_back(place: Path, undisturbed: Any) -> None:
    steps = 60  # so many that a busy machine stops it before the last one
    machines = Machines(place, "stopped", 1, "deferred", max_steps=steps)
    machines.hire()
    machines.wait_for_step(2)
    os.kill(machines.workers[0].pid or 0, signal.SIGSTOP)
    machines.hire()
    # One step may have been under way, whose end was told already: the one after it is the other worker's.
    machines.wait_for_step(machines.steps_done() + 2)
    os.kill(machines.workers[0].pid or 0, signal.SIGCONT)
    assert machines.finish() == undisturbed("deferred", 1, steps)
    assert machines.workers[0].exitcode == 0
    said = machines.said_by(1).read_text()
    assert "it went on without this worker, which shows no sign of life for 3 s; waiting for it" in said


@pytest.mark.parametrize("seed", sampled([3, 5, 9], [3]))
def test_a_run_is_killed_to_one_worker_of_four_and_gets_three_more(seed: int, place: Path) -> None:
    """Under a tree it ends with the bytes of a run with one worker, whom nobody disturbed."""
    steps, dice = 40, random.Random(seed)
    how: dict[str, Any] = {"max_steps": steps, "tokens_per_step": 512, "gradient_sum": "tree"}
    machines = Machines(place, f"elastic-{seed}", "1:4", "deferred", grace=2.0, **how)
    machines.hire(4)
    machines.wait_for_step(3)
    time.sleep(dice.random() * 0.2)
    for victim in dice.sample(range(4), 3):
        kill(machines.workers[victim])
    machines.wait_for_step(machines.steps_done() + 2)
    machines.hire(3)
    machines.wait_for_step(machines.steps_done() + 2)
    time.sleep(dice.random() * 0.2)
    kill(machines.workers[4])
    found = machines.finish()
    logs = [machines.said_by(name) for name in range(1, machines.names + 1)]
    said = "".join(log.read_text() for log in logs if log.exists())  # who is killed at once may have said nothing
    assert "of 4; micro-batches" in said, "four have taken part"
    whole = Machines(place, f"elastic-whole-{seed}", 1, "deferred", plan=str(machines.output), **how)
    whole.hire()
    assert found == whole.finish()


@pytest.mark.deep
def test_a_second_node_on_one_directory_is_refused(place: Path) -> None:
    """The first one waits for workers, with its run made."""
    machines = Machines(place, "twice", 1, "deferred")
    machines.wait_for(machines.output / MANIFEST_NAME)
    said = place / "refused"
    other = PROCESSES.Process(
        target=node_processes.another_node, args=(str(place), str(machines.output), str(said), machines.more)
    )
    other.start()
    other.join(100)
    kill(other)
    assert f"in use by process {machines.node.pid}" in said.read_text()
    assert machines.node.is_alive()
    kill(machines.node)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "runs", [pytest.param(10, marks=pytest.mark.deep), pytest.param(20, marks=pytest.mark.soak)], ids=["fifty", "a hundred"]
)
def test_kills_with_spares_already_started(runs: int, place: Path, undisturbed: Any) -> None:
    expected, dice = undisturbed("deferred", 1), random.Random(11)
    for number in range(runs):
        machines = Machines(place, f"killed-{runs}-{number}", 1, "deferred")
        machines.hire(6)
        for kills in range(5):
            machines.wait_for_step(1 + kills)
            time.sleep(dice.random() * 0.2)
            if kills == 2:
                kill(machines.node)
                machines.start_node()
            else:
                kill(machines.workers[kills])
        machines.hire()
        assert machines.finish() == expected
