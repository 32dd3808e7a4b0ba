"""After a step nothing waits for the garbage collector: what is freed late is memory that no plan counts.

Run: pytest tests/equivalence/test_nothing_is_left.py
"""

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import batch_of
from tiers import sampled

import headrace
from headrace.engine.trainer import Engine
from headrace.flow.weights.buffers import Buffers
from headrace.model.blocks.binding import Binding, GradientSink
from headrace.store import StateStore
from headrace.terms.errors import HeadraceError
from headrace.terms.layout import ParameterSpec

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


@pytest.mark.wide
@pytest.mark.parametrize("optimizer", ["lomo", "adamw"])
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_one_units_gradients_are_alive_at_a_time_and_no_parameter_keeps_one(
    name: str, optimizer: str, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What autograd makes is handed over and freed, unit by unit, in backward; the engine's own buffers are the plan's."""
    alive: Counter[int] = Counter()
    units: list[set[int]] = []
    parameters: list[torch.nn.Parameter] = []
    bind = Binding.bind

    def watching(self: Binding, unit: int, flat: torch.Tensor, sink: GradientSink | None, *given: Any, **more: Any) -> None:
        def taking(spec: ParameterSpec, gradient: torch.Tensor) -> None:
            alive[unit] += 1
            weakref.finalize(gradient.untyped_storage(), alive.subtract, {unit: 1})
            units.append({each for each, count in alive.items() if count})
            assert sink is not None
            sink(spec, gradient)

        bind(self, unit, flat, sink and taking, *given, **more)

    monkeypatch.setattr(Binding, "bind", watching)
    options = headrace.Options(
        host_memory="4GiB",
        output=tmp_path / "run",
        optimizer=optimizer,
        max_grad_norm=None,
        tokens_per_step=ROWS * LENGTH,
        sequence_length=LENGTH,
    )
    with Engine.open(model_dir(name), options) as engine:
        for seed in range(2):
            engine.step(batch_of(ROWS, LENGTH, seed))
            parameters = list(engine._subject.chain.model.parameters())
            assert [parameter for parameter in parameters if parameter.grad is not None] == []
    assert parameters
    assert len(units) > 2 * 4
    assert max(map(len, units)) == 1
    assert not +alive


def step_and_flush(engine: Engine) -> None:
    engine.step(batch_of(ROWS, LENGTH, 1))
    engine.flush()


@pytest.mark.parametrize("nth", [0, 7])
def test_a_step_that_fails_gives_its_buffers_back_and_is_taken_again(
    nth: int, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, taken = model_dir("llama"), []
    options = headrace.Options(host_memory="4GiB", tokens_per_step=ROWS * LENGTH, sequence_length=LENGTH)
    with Engine.open(path, replace(options, output=tmp_path / "whole")) as engine:
        expected = [engine.step(batch_of(ROWS, LENGTH, seed)).loss for seed in range(2)]
    make, write, count = Buffers.__init__, StateStore.write, itertools.count()

    def making(self: Buffers, *given: Any, **more: Any) -> None:
        make(self, *given, **more)
        taken.append(weakref.ref(self.host_weights[0].base))

    def failing(self: StateStore, *given: Any, **more: Any) -> Any:
        if next(count) == nth:
            raise OSError(5, "the drive is gone")
        return write(self, *given, **more)

    monkeypatch.setattr(Buffers, "__init__", making)
    with Engine.open(path, replace(options, output=tmp_path / "run")) as engine:
        losses = [engine.step(batch_of(ROWS, LENGTH, 0)).loss]
        engine.flush()
        monkeypatch.setattr(StateStore, "write", failing)
        with pytest.raises(HeadraceError, match="the drive is gone"):
            step_and_flush(engine)
    monkeypatch.setattr(StateStore, "write", write)
    del engine
    gc.collect()
    assert [place() for place in taken] == [None]
    with Engine.resume(tmp_path / "run") as engine:
        losses.append(engine.step(batch_of(ROWS, LENGTH, 1)).loss)
    assert losses == expected


def test_the_test_would_see_one(collected: Callable[[], list[torch.Tensor]]) -> None:
    cycle: list[object] = [torch.ones(3)]
    cycle.append(cycle)
    del cycle
    assert [tuple(tensor.shape) for tensor in collected()] == [(3,)]
