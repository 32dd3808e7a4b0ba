"""On a processor without products of 16-bit numbers: training is as near to float32 as with them, and places change no bit.

Both processors are feigned, so that this machine's own does not matter. Run: pytest tests/equivalence/test_wide_products.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, ROWS, PlainTrainer, batch_of, train
from tiers import sampled

from headrace.machine.cpu import CpuMachine
from headrace.model.kernels import products

STEPS = 3
PLACEMENTS: dict[str, dict[str, Any]] = {
    "one after the other": {"interpreter": "plain"},
    "few slots": {"adjust": {"host_slots": 2, "prefetch": 1, "state_slots": 1, "gradient_slots": 1, "resident_states": ()}},
    "all outputs kept": {"adjust": {"kept": lambda plan: tuple(tuple(range(len(names))) for names in plan.stash.operators)}},
    "nothing kept or skipped": {"adjust": {"kept": ((),) * 4, "skipped": ((),) * 4}},
    "a device of its own": {"device_memory": "1GiB"},
}


def feign(monkeypatch: pytest.MonkeyPatch, multiplies: bool) -> list[Any]:
    """Feign a processor; return the list of operators that will have gone by way of float32."""
    widened: list[Any] = []
    multiplied_wide = products.multiplied_wide

    def counted(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        widened.append(func)
        return multiplied_wide(func, args, kwargs)

    monkeypatch.setattr(CpuMachine, "multiplies", lambda machine, dtype: multiplies)
    monkeypatch.setattr(products, "multiplied_wide", counted)
    return widened


@pytest.mark.parametrize("placement", sampled(PLACEMENTS, ["few slots", "a device of its own"]))
def test_places_change_no_bit(
    placement: str, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    widened = feign(monkeypatch, False)
    path = model_dir("llama", "bfloat16")
    losses, weights = train(path, tmp_path / "as planned")
    assert widened
    placed_losses, placed_weights = train(path, tmp_path / "placed", **PLACEMENTS[placement])
    assert placed_losses == losses
    assert all(torch.equal(placed_weights[name], value) for name, value in weights.items())


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "dtype", "multiplies"),
    sampled(
        [
            (name, dtype, multiplies)
            for name, dtype in [("llama", "bfloat16"), ("llama", "float16"), ("mixtral-aux", "bfloat16")]
            for multiplies in (True, False)
        ],
        [("llama", "bfloat16", True), ("llama", "float16", False), ("mixtral-aux", "bfloat16", False)],
    ),
)
def test_losses_are_those_of_float32(
    name: str, dtype: str, multiplies: bool, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    widened = feign(monkeypatch, multiplies)
    path = model_dir(name, "bfloat16")
    plain = PlainTrainer(path, 1e-3, 0.1, None)
    expected = [plain.step(batch_of(ROWS, LENGTH, seed))[0] for seed in range(STEPS)]
    losses, _ = train(path, tmp_path / "run", compute_dtype=dtype, steps=STEPS)
    assert losses == pytest.approx(expected, rel=3e-3)
    assert bool(widened) is not multiplies


@pytest.mark.deep
def test_compiled_blocks_multiply_as_the_compiler_does(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    widened = feign(monkeypatch, False)
    train(model_dir("llama", "bfloat16"), tmp_path / "run", compile_blocks=True)
    assert not widened
