"""A whole training run: options, run directory, loop, signals, the finished model."""

from headrace.data.open_data import open_tokens
from headrace.runs.loop import Finished, resume, train
from headrace.runs.protocols import Display, Engines, RunningEngine
from headrace.runs.signals import Interrupted
from headrace.store.run_directory import RunDirectory
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
