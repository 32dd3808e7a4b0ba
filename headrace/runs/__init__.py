"""A whole training run: options, run directory, loop, signals, the finished model."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.data.batches.open_data import open_tokens as open_tokens
    from headrace.runs.loop import Finished as Finished
    from headrace.runs.loop import resume as resume
    from headrace.runs.loop import train as train
    from headrace.runs.protocols import Display as Display
    from headrace.runs.protocols import Engines as Engines
    from headrace.runs.protocols import RunningEngine as RunningEngine
    from headrace.runs.signals import Interrupted as Interrupted
    from headrace.store.run_directory import RunDirectory as RunDirectory
    from headrace.terms.options.run_options import RunOptions as RunOptions

__getattr__ = lazy_face(__name__)
