"""After a step nothing waits for the garbage collector: what is freed late is memory that no plan counts.

Run: pytest tests/equivalence/test_nothing_is_left.py
"""

import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from plain import batch_of
from tiers import sampled

import headrace
from headrace.engine.trainer import Engine

ROWS, LENGTH = 4, 32


@pytest.fixture
def collected() -> Iterator[Callable[[], list[torch.Tensor]]]:
    """Keep the collector off; give what it would have freed, tensors only."""

    def tensors() -> list[torch.Tensor]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        found = [item for item in gc.garbage if isinstance(item, torch.Tensor)]
        gc.garbage.clear()
        return found

    gc.collect()
    gc.disable()
    try:
        yield tensors
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize(
    ("name", "clip"), sampled(itertools.product(["llama", "mixtral-aux"], [None, 1.0]), [("llama", 1.0), ("mixtral-aux", None)])
)
def test_a_step_leaves_no_tensor_in_a_cycle(
    name: str, clip: float | None, model_dir: Callable[..., Path], tmp_path: Path, collected: Callable[[], list[torch.Tensor]]
) -> None:
    with Engine.open(
        model_dir(name),
        headrace.Options(
            host_memory="4GiB",
            output=tmp_path / "run",
            max_grad_norm=clip,
            tokens_per_step=ROWS * LENGTH,
            sequence_length=LENGTH,
        ),
    ) as engine:
        engine.step(batch_of(ROWS, LENGTH, 0))  # what the first step compiles and keeps is its own affair
        collected()
        for seed in (1, 2):
            engine.step(batch_of(ROWS, LENGTH, seed))
        assert [tuple(tensor.shape) for tensor in collected()] == []


def test_the_test_would_see_one(collected: Callable[[], list[torch.Tensor]]) -> None:
    cycle: list[object] = [torch.ones(3)]
    cycle.append(cycle)
    del cycle
    assert [tuple(tensor.shape) for tensor in collected()] == [(3,)]
