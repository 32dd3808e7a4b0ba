"""Each unit counts its own updates: what a rule makes of the count is that unit's alone, and survives a resume.

Run: pytest tests/equivalence/test_update_counts.py
"""

from collections.abc import Callable
from pathlib import Path

import torch
from plain import batch_of
from safetensors.torch import load_file

import headrace
from headrace.engine.trainer import Engine

ROWS, LENGTH = 2, 32
AHEAD, COUNT = 1, 500  # the first block, as if it had been trained for long: AdamW corrects its moments by less then


def weights_of(engine: Engine, out: Path) -> dict[str, torch.Tensor]:
    engine.save_pretrained(out)
    return {name: tensor for shard in out.glob("*.safetensors") for name, tensor in load_file(shard).items()}


def one_step(path: Path, folder: Path, counts: dict[int, int]) -> tuple[dict[str, torch.Tensor], list[int]]:
    options = headrace.Options(
        output=folder / "run",
        host_memory="4GiB",
        max_grad_norm=None,
        learning_rate=1e-3,
        compute_dtype="float32",
        tokens_per_step=ROWS * LENGTH,
        sequence_length=LENGTH,
    )
    with Engine.open(path, options) as engine:
        engine._updates = tuple(counts.get(unit, count) for unit, count in enumerate(engine._updates))
        engine.step(batch_of(ROWS, LENGTH, 0))
        weights = weights_of(engine, folder / "out")
    with Engine.resume(folder / "run") as engine:
        return weights, list(engine._updates)


def test_a_unit_goes_by_its_own_count(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("llama")
    usual, ones = one_step(path, tmp_path / "usual", {})
    ahead, counts = one_step(path, tmp_path / "ahead", {AHEAD: COUNT})
    assert set(ones) == {1}
    assert counts == [COUNT + 1 if unit == AHEAD else 1 for unit in range(len(ones))]
    changed = {name for name, tensor in usual.items() if not torch.equal(tensor, ahead[name])}
    assert changed
    assert all(".layers.0." in name for name in changed)
