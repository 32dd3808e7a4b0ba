"""A whole training run: options, run directory, loop, signals, the finished model."""

from headrace.runs.config import RunConfig
from headrace.runs.data import open_tokens
from headrace.runs.loop import Finished, resume, train
from headrace.runs.protocols import Display, Engines, RunningEngine
from headrace.runs.run_directory import RunDirectory
from headrace.runs.signals import Interrupted

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
