"""A whole training run: options, run directory, loop, signals, the finished model."""

from headrace.training.base import Display, Engines, RunningEngine
from headrace.training.config import RunConfig
from headrace.training.data import open_tokens
from headrace.training.loop import Finished, resume, train
from headrace.training.run_directory import RunDirectory
from headrace.training.signals import Interrupted

__all__ = [
    "Display",
    "Engines",
    "Finished",
    "Interrupted",
    "RunConfig",
    "RunDirectory",
    "RunningEngine",
    "open_tokens",
    "resume",
    "train",
]
