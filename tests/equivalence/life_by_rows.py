"""The life of a run that trains tables by rows, beside that of the dense run whose bits it has."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.open_model import open_run
from headrace.engine.trainer import Engine
from headrace.terms.errors import RunDirectoryError


def assert_lives_are_alike(
    opened: Callable[[str, Path], Engine], way: str, batches: Sequence[dict[str, torch.Tensor]], folder: Path
) -> Path:
    """Open runs with `--gradient dense` and `way`; step, evaluate, keep, close, resume, step and export each, and compare all.

    What an evaluation reads is not written. Returns the directory of the run by rows.
    """
    found, runs = [], {"dense": folder / "dense", way: folder / "rows"}
    for gradient, run in runs.items():
        with opened(gradient, run) as engine:
            said: list[Any] = [engine.step(batches[0]).loss, engine.evaluate(batches[2]).loss]
            engine.begin_saving(run.with_suffix(".kept")).wait()
        with Engine.resume(run) as engine:
            said += [engine.step(batches[1]).loss, engine.evaluate(batches[2]).loss]
            said.append(engine.next_logits({"input_ids": batches[2]["input_ids"]}).tolist())
            engine.save_pretrained(run.with_suffix(".final"))
            said.append(engine.step(batches[0]).loss)
        found.append(said)
    assert found[0] == found[1]
    for suffix in (".kept", ".final"):
        one, other = ((run.with_suffix(suffix) / "model.safetensors").read_bytes() for run in runs.values())
        assert one == other
    with pytest.raises(RunDirectoryError, match="it updates rows of tables one by one, and its units lack them"):
        open_run(runs[way], None, lambda event: None)
    return runs[way]
