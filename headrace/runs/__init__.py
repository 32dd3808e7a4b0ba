"""A whole training run: options, run directory, loop, signals, the finished model."""

from headrace.runs.loop import Finished, resume, train
from headrace.runs.open_data import open_tokens
from headrace.runs.protocols import Display, Engines, RunningEngine
from headrace.runs.run_directory import RunDirectory
from headrace.runs.signals import Interrupted
from headrace.terms.run_options import RunOptions

__all__ = [
    "Display",
    "Engines",
    "Finished",
    "Interrupted",
    "RunDirectory",
    "RunOptions",
    "RunningEngine",
    "open_tokens",
    "resume",
    "train",
]
