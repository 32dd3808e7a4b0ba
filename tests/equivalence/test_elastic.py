"""Workers come and go between two numbers: no step waits for who is not there, and the bits are those of one machine's tree."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, node_options, weights_of
from plain import LENGTH, SPLIT, batch_of
from short_run import short_run

from headrace.engine.seams import Seams
from headrace.engine.trainer import Engine
from headrace.peers.node.node import NodeEngine
from headrace.plan.value.plan import Plan
from headrace.terms.errors import ConfigError, PeerLost, StepFailed
from headrace.terms.events import Event, Notice
from headrace.terms.options.muster import Muster
from headrace.terms.options.run_options import NodeOptions

BATCHES = [batch_of(8, LENGTH, seed) for seed in range(5)]
SPLIT_IN_FOUR = {**SPLIT, "micro_batch_sequences": 2, "num_micro_batches": 4, "loss_chunk_tokens": 2 * LENGTH}
HOW: dict[str, Any] = {"max_grad_norm": 0.5, "compute_dtype": "float32", "gradient_sum": "tree"}


class Fleet(Crew):
    """A crew that begins with one worker and takes in up to `most`; what the node says is kept."""

    def __init__(self, most: int, grace_seconds: float = 200.0, least: int = 1) -> None:
        super().__init__(0, muster=Muster(least, most, grace_seconds))
        self.told = list[Event]()

    def hire_and_wait(self, count: int, **own: Any) -> None:
        """Hire workers, and wait until they wait to be invited."""
        before = self.listener.num_waiting()
        for number in range(count):
            self.hire(f"late {number}", **own)
        wait_until(lambda: self.listener.num_waiting() >= before + count)

    def size(self) -> int:
        return self.crowd.generation.num_workers

    def said(self) -> str:
        return "\n".join(event.text for event in self.told if isinstance(event, Notice))


def wait_until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 240  # ends a standstill
    while not what():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def alone(model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, dict[str, torch.Tensor]]:
    """Return the plan and the final weights of a run on one machine."""
    plans, folder = list[Plan](), tmp_path_factory.mktemp("alone") / "run"

    def look(engine: Engine) -> None:
        assert engine.plan is not None
        plans.append(engine.plan)

    _, weights = short_run(model_dir("llama"), folder, BATCHES, adjust=SPLIT_IN_FOUR, inspect=look, **HOW)
    return plans[0], weights


def opened(made: Fleet, path: Path, output: Path, plan: Plan) -> NodeEngine:
    options = node_options(output, BATCHES, **HOW)
    return NodeEngine.open(path, options, plan=plan, seams=Seams(workers=made.crowd), sink=made.told.append)


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.wide
def test_who_comes_later_takes_part_from_the_next_step_on(
    alone: tuple[Plan, dict[str, torch.Tensor]], model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """From one to four and no further: the fifth stays a spare. No step is computed twice."""
    made, sizes = Fleet(4), []
    with opened(made, model_dir("llama"), tmp_path / "node", alone[0]) as engine:
        made.hire("first")
        for number, batch in enumerate(BATCHES):
            if number in (1, 3):
                made.hire_and_wait(1 if number == 1 else 3)
            assert engine.step(batch).step == number
            sizes.append(made.size())
        engine.save_pretrained(tmp_path / "out")
    assert sizes == [1, 2, 2, 4, 4]
    made.join()
    assert equal(weights_of(tmp_path / "out"), alone[1])


@pytest.mark.deep
@pytest.mark.parametrize("grace", [0.0, 0.5])
def test_a_run_goes_on_with_those_that_are_left(
    grace: float, alone: tuple[Plan, dict[str, torch.Tensor]], model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """A worker is killed in a step, and comes back two steps later."""
    path, output, sizes = model_dir("llama"), tmp_path / "node", []
    made = Fleet(2, grace, least=1)
    made.hire("first")
    made.hire_and_wait(1)
    wait_until(lambda: made.listener.num_waiting() == 2)
    engine = opened(made, path, output, alone[0])
    with engine:
        engine.step(BATCHES[0])
        assert made.size() == 2
        victim = made.listener._members[1]
        engine.flush()
        # As if it had been killed: its connections break, and it is not there any more.
        made.listener._spares[victim.peer] = "it is dead"
        made.crowd.generation.end("worker 2 is killed")
        with pytest.raises((PeerLost, StepFailed)):
            engine.step(BATCHES[1])
    made.crowd.part("it goes on")
    with NodeEngine.resume(output, seams=Seams(workers=made.crowd), verify=False) as engine:
        while engine.step_index < len(BATCHES):
            if engine.step_index == 3:
                made.listener._spares.clear()
                made.crowd.muster = Muster(1, 2, 200.0)
                wait_until(lambda: made.listener.num_waiting() > 0 or made.size() == 2)
            engine.step(BATCHES[engine.step_index])
            sizes.append(made.size())
        engine.save_pretrained(tmp_path / "out")
    assert sizes == [1, 1, 2, 2]
    made.join()
    assert equal(weights_of(tmp_path / "out"), alone[1])


@pytest.mark.deep
def test_who_has_no_room_for_the_run_stays_a_spare_and_is_told_why(
    alone: tuple[Plan, dict[str, torch.Tensor]], model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    made = Fleet(3)
    with opened(made, model_dir("llama"), tmp_path / "node", alone[0]) as engine:
        made.hire("first")
        engine.step(BATCHES[0])
        made.hire_and_wait(1, host_memory="1MiB")
        for batch in BATCHES[1:]:
            engine.step(batch)
            assert made.size() == 1
        engine.save_pretrained(tmp_path / "out")
    assert "stays a spare: " in made.said()
    made.join()
    assert equal(weights_of(tmp_path / "out"), alone[1])


@pytest.mark.deep
def test_no_more_workers_than_micro_batches_take_part(
    alone: tuple[Plan, dict[str, torch.Tensor]], model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    made = Fleet(7)
    made.hire_and_wait(5)
    with opened(made, model_dir("llama"), tmp_path / "node", alone[0]) as engine:
        engine.step(BATCHES[0])
        assert made.size() == 4
    assert "a step has 4 micro-batches of 2 rows" in made.said()
    made.join()


def test_what_an_elastic_number_of_workers_asks_for() -> None:
    values = {"model": "m", "data": ["d"]}
    assert NodeOptions.of(values | {"workers": "1:4"}).gradient_sum == "tree"
    assert NodeOptions.of(values | {"workers": "3:3"}).workers == 3
    assert NodeOptions.of(values | {"workers": 2}).gradient_sum == "sequential"
    with pytest.raises(ConfigError, match="gradient_sum: sequential rounds otherwise for each number of workers"):
        NodeOptions.of(values | {"workers": "1:4", "gradient_sum": "sequential"})
    for wrong in ("4:1", "0:2", "1:2:3", ":", "1:", "many", True, 1.5):
        with pytest.raises(ConfigError, match="workers: expected a whole number from 1 to 4096, or MIN:MAX"):
            NodeOptions.of(values | {"workers": wrong})
