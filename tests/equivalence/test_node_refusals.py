"""What a node does not do yet is refused by name, before workers are waited for."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crew import Crew, crew, node_run
from plain import LENGTH, ROWS, batch_of

import headrace
from headrace.engine.trainer import Engine
from headrace.peers.node.run import refuse_another, serve
from headrace.peers.node.working import deciding_options
from headrace.store import RunLock
from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import ConfigError, PlanInfeasible, RunDirectoryError
from headrace.terms.events import Event, Notice
from headrace.terms.options.muster import Muster
from headrace.terms.options.run_options import NodeOptions


@pytest.mark.parametrize(
    ("model", "workers", "options", "words"),
    [
        ("mixtral-aux", 2, {}, "has router losses of a whole step, which are not gathered from workers yet"),
        ("llama", 1, {"gradient": "lsp"}, "gradient: lsp.* is not possible at a node"),
        ("llama", ROWS + 1, {}, f"workers: {ROWS + 1} were asked for, but a step has {ROWS} rows"),
    ],
)
def test_what_is_not_possible_is_said(
    model: str, workers: int, options: dict[str, Any], words: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path, batches = model_dir(model, "bfloat16"), [batch_of(ROWS, LENGTH, 0)]
    with crew(0) as nobody:
        nobody.crowd.muster = Muster.of(workers)
        with pytest.raises(ConfigError, match=words):
            node_run(path, tmp_path / "node", batches, nobody, **options)


def test_workers_that_cannot_take_part_are_not_waited_for(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """They leave while the node is about to send them something that nobody takes."""
    told, made = list[Event](), Crew(0)
    made.crowd.muster = Muster.of(2)
    made.hire("able")
    made.hire("poor", host_memory="1MiB")
    with pytest.raises(PlanInfeasible):
        node_run(model_dir("llama", "bfloat16"), tmp_path / "node", [batch_of(ROWS, LENGTH, 0)], made, sink=told.append)
    made.listener.close()
    assert any("worker poor cannot go on: " in event.text for event in told if isinstance(event, Notice)), told


def test_a_worker_s_file_must_be_of_the_node_s_run(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Keys that decide numbers are compared; budgets are each process's own."""
    path, batches = model_dir("llama", "bfloat16"), [batch_of(ROWS, LENGTH, 0)]
    same = deciding_options({"model": path, "data": "d", "learning_rate": "1e-3", "host_memory": "9GiB"}, "run.yaml")
    assert same == {"learning_rate": 1e-3}
    for asked, words in (
        (same, None),
        (same | {"seed": 5, "weight_decay": 0.2}, "seed 5 here, 0 at the node; weight_decay 0.2"),
    ):
        made = Crew(0)
        made.crowd.muster = Muster.of(1)
        made.hire("asking", asked=asked)
        if words is None:
            node_run(path, tmp_path / "same", batches, made)
            made.join()
        else:
            with pytest.raises(ConfigError, match=words):
                node_run(path, tmp_path / "other", batches, made)
            made.listener.close()


def test_a_run_is_not_gone_on_with_under_other_options(tmp_path: Path) -> None:
    """What a changed file asks for would be ignored otherwise; what belongs to this process may change."""
    values = {"model": tmp_path / "model", "data": ["d"], "output": tmp_path / "run", "max_steps": 3, "seed": 1}
    RunDirectory(tmp_path / "run").write_config(NodeOptions.of(values | {"data": [str(Path("d").absolute())]}))
    own = {"listen": "127.0.0.1:0", "workers": 2, "ssd": ["elsewhere"]}
    for more, words in (
        ({"learning_rate": 2e-4, "max_steps": 4}, "learning_rate 0.0002 here, 1e-05 there; max_steps 4 here, 3 there; resume"),
        ({"data": ["other"]}, "holds a run that began otherwise: data"),
        ({"model": tmp_path / "other"}, "holds a run of .*model; name another"),
    ):
        with pytest.raises(RunDirectoryError, match=words):
            serve(NodeOptions.of(values | own | more))
    refuse_another(RunDirectory(tmp_path / "run"), NodeOptions.of(values | own))


def test_a_node_that_listens_already_is_named_by_its_run(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = NodeOptions.of({"model": "m", "data": ["d"], "output": tmp_path, "listen": f"127.0.0.1:{port}"})
        with pytest.raises(ConfigError, match="name a free port"):
            serve(config)
        lock = RunLock(tmp_path)
        try:
            with pytest.raises(RunDirectoryError, match=f"in use by process {os.getpid()}"):
                serve(config)
        finally:
            lock.release()


def test_a_tree_of_other_gradients_is_refused() -> None:
    with pytest.raises(ConfigError, match="gradient_sum: tree adds whole gradients, but gradient is lsp"):
        headrace.Options(gradient="lsp", gradient_sum="tree")


def test_a_node_s_run_is_not_resumed_without_workers(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    with crew() as made:
        node_run(model_dir("llama", "bfloat16"), tmp_path / "node", [batch_of(ROWS, LENGTH, 0)], made)
    with pytest.raises(RunDirectoryError, match="workers: the run was begun with node"):
        Engine.resume(tmp_path / "node")
