"""A far site for tests: float32 masters in memory and plain gradient descent; commits lie in a folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.machine.host_memory import Bytes
from headrace.update.rules.rule import StepScalars
from headrace.update.rules.tensors import as_tensor


class FarSite:
    """Holds `units` (None: all) and updates them by SGD without momentum or decay; `compute_dtype` is that of the run.

    `folder` has the commits of the last two steps.
    """

    name = "far"

    def __init__(self, folder: Path, compute_dtype: str, units: tuple[int, ...] | None = None) -> None:
        self._folder, self._units = folder, units
        self._dtype: torch.dtype = getattr(torch, compute_dtype)
        self._masters: dict[int, Tensor] = {}
        self._pushed: dict[int, Tensor] = {}
        folder.mkdir(exist_ok=True)

    def holds(self, unit: int) -> bool:
        """Return whether `unit` is one of them."""
        return self._units is None or unit in self._units

    def begin(self, unit: int, weights: Bytes) -> None:
        """Take weights as the first masters."""
        self._masters[unit] = torch.from_numpy(weights).view(self._dtype).to(torch.float32, copy=True)

    def pull(self, unit: int, into: Bytes) -> None:
        """Round the masters to the compute dtype."""
        torch.from_numpy(into).view(self._dtype).copy_(self._masters[unit])

    def push(self, unit: int, gradient: NDArray[Any]) -> None:
        """Keep the gradient until the step is concluded."""
        self._pushed[unit] = as_tensor(gradient, bfloat16=True).to(torch.float32, copy=True)

    def conclude(self, scalars: Mapping[int, StepScalars] | None) -> None:
        """Take a step against the gradients."""
        for unit, step in (scalars or {}).items():
            self._masters[unit] -= step.learning_rate * (self._pushed[unit] * step.gradient_scale)
        self._pushed.clear()

    def commit(self, num_steps: int) -> None:
        """Write the masters, and remove those of the last commit but one."""
        partial = self._folder / "partial"
        torch.save(self._masters, partial)
        partial.replace(self._folder / f"{num_steps}.pt")
        for path in self._folder.glob("*.pt"):
            if int(path.stem) < num_steps - 1:
                path.unlink()

    def go_back(self, num_steps: int) -> None:
        """Read the masters of that step."""
        self._masters = torch.load(self._folder / f"{num_steps}.pt")
