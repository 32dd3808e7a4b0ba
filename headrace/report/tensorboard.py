"""TensorBoard events, on request. The package `tensorboard` is an optional dependency.

Invariant: after a resume, points of steps that were not committed are purged, so no step is drawn twice.
"""

from pathlib import Path
from typing import Any

from headrace.spec.errors import ConfigError
from headrace.spec.events import Event, StepResult


class TensorBoard:
    """Writes scalars under the names that people search for: `train/loss`, `train/grad_norm`, `train/learning_rate`, ...

    Raises:
        ConfigError: the package `tensorboard` is not installed.
    """

    def __init__(self, directory: Path, *, committed_steps: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "report_to: tensorboard was asked for, but its package is missing; run `pip install headrace[tensorboard]`"
            ) from error
        writer: Any = SummaryWriter
        self._writer = writer(str(directory), purge_step=committed_steps + 1)

    def __call__(self, event: Event) -> None:
        """Take the end of a step."""
        if not isinstance(event, StepResult):
            return
        scalars = {
            "train/loss": event.loss,
            "train/grad_norm": event.grad_norm,
            "train/learning_rate": event.learning_rate,
            "train/tokens_per_second": event.tokens_per_second,
            "train/skipped": float(event.skipped is not None),
            **{f"bytes_read/{tier}": size for tier, size in event.bytes_read.items()},
            **{f"bytes_written/{tier}": size for tier, size in event.bytes_written.items()},
            **{f"peak_bytes/{tier}": size for tier, size in event.peak_bytes.items()},
        }
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, event.step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
