"""A tiny model with float32 weights, its data, and plans that are not searched for."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import node_processes
import pytest
import torch
from first_plans import Plans

import headrace.ask.planner
from headrace.peers.local_steps.outer import OuterState, outer_options
from headrace.terms.options.run_options import NodeOptions


@pytest.fixture(autouse=True, scope="package")
def planned() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headrace.ask.planner, "make_plan", Plans())
        yield


@pytest.fixture(scope="package")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    node_processes.write_model(folder, torch.float32)
    return folder


@pytest.fixture
def options(place: Path) -> Callable[..., NodeOptions]:
    """Return a function that makes the options of a node's run in `output`."""

    def make(output: Path, **more: Any) -> NodeOptions:
        values = {
            "model": place / "model",
            "data": [str(place / "data.jsonl")],
            "output": output,
            "cache": place / "cache",
            "listen": "127.0.0.1:0",
            "sequence_length": 32,
            "tokens_per_step": 64,
            "host_memory": "2GiB",
            "learning_rate": 1e-3,
            "local_steps": 3,
            "max_steps": 9,
            "grace": 0,
        }
        return NodeOptions.of(values | more)

    return make


@pytest.fixture
def begun(options: Callable[..., NodeOptions]) -> Callable[..., OuterState]:
    """Return a function that begins the state of a node in `output`."""

    def begin(output: Path, **more: Any) -> OuterState:
        config = options(output, **more)
        outer = outer_options(config, config.outer, config.outer_learning_rate)
        return OuterState.begin(config.model, outer, lambda event: None, final=output / "final")

    return begin
