"""What a node does not do yet is refused by name, before workers are waited for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crew import Crew, crew, node_run
from plain import LENGTH, ROWS, batch_of

import headrace
from headrace.engine.trainer import Engine
from headrace.runs.node import asked_of
from headrace.terms.errors import ConfigError, PlanInfeasible, RunDirectoryError
from headrace.terms.events import Event, Notice


@pytest.mark.parametrize(
    ("model", "workers", "options", "words"),
    [
        ("mixtral-aux", 2, {}, "has router losses, of a whole step and not gathered from workers yet"),
        ("llama", 1, {"gradient": "lsp"}, "gradient: lsp.* is not possible at a node"),
        ("llama", ROWS + 1, {}, f"workers: {ROWS + 1} of them, and a step has {ROWS} rows"),
    ],
)
def test_what_is_not_possible_is_said(
    model: str, workers: int, options: dict[str, Any], words: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path, batches = model_dir(model, "bfloat16"), [batch_of(ROWS, LENGTH, 0)]
    with crew(0) as nobody:
        nobody.crowd.num_workers = workers
        with pytest.raises(ConfigError, match=words):
            node_run(path, tmp_path / "node", batches, nobody, **options)


def test_workers_that_cannot_take_part_are_not_waited_for(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """They leave while the node is about to send them something that nobody takes."""
    told, made = list[Event](), Crew(0)
    made.crowd.num_workers = 2
    made.hire("able")
    made.hire("poor", host_memory="1MiB")
    with pytest.raises(PlanInfeasible):
        node_run(model_dir("llama", "bfloat16"), tmp_path / "node", [batch_of(ROWS, LENGTH, 0)], made, sink=told.append)
    made.listener.close()
    assert any("worker poor cannot go on: " in event.text for event in told if isinstance(event, Notice)), told


def test_a_worker_s_file_must_be_of_the_node_s_run(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Keys that decide numbers are compared; budgets are each process's own."""
    path, batches = model_dir("llama", "bfloat16"), [batch_of(ROWS, LENGTH, 0)]
    same = asked_of({"model": path, "data": "d", "learning_rate": "1e-3", "host_memory": "9GiB"}, "run.yaml")
    assert same == {"learning_rate": 1e-3}
    for asked, words in (
        (same, None),
        (same | {"seed": 5, "weight_decay": 0.2}, "seed 5 here, 0 at the node; weight_decay 0.2"),
    ):
        made = Crew(0)
        made.crowd.num_workers = 1
        made.hire("asking", asked=asked)
        if words is None:
            node_run(path, tmp_path / "same", batches, made)
            made.join()
        else:
            with pytest.raises(ConfigError, match=words):
                node_run(path, tmp_path / "other", batches, made)
            made.listener.close()


def test_a_tree_of_other_gradients_is_refused() -> None:
    with pytest.raises(ConfigError, match="gradient_sum: tree adds whole gradients, but gradient is lsp"):
        headrace.Options(gradient="lsp", gradient_sum="tree")


def test_a_node_s_run_is_not_resumed_without_workers(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    with crew() as made:
        node_run(model_dir("llama", "bfloat16"), tmp_path / "node", [batch_of(ROWS, LENGTH, 0)], made)
    with pytest.raises(RunDirectoryError, match="workers: the run was begun with node"):
        Engine.resume(tmp_path / "node")
