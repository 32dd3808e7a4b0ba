"""The recorded steps as a Chrome trace, made after the run; `report_to: trace` writes one during the run.

Invariant: the trace has each operation of `timeline.json` once, on the lane on which it ran.
"""

import contextlib
from pathlib import Path

from headrace.report.lanes import TIMELINE_NAME, read_recording
from headrace.report.trace_file import TraceFile
from headrace.terms.errors import RunDirectoryError


def write_trace(run_directory: str | Path, out: str | Path) -> Path:
    """Write the newest recorded steps of a run as a trace for https://ui.perfetto.dev and return its path.

    Raises:
        RunDirectoryError: the run has recorded no operations, or the file cannot be written.
    """
    recording = read_recording(Path(run_directory) / TIMELINE_NAME)
    path = Path(out)
    ops = sorted((op for step in recording.steps for op in step.ops), key=lambda op: op.stop_seconds)
    try:
        with contextlib.closing(TraceFile(path)) as trace:
            for op in ops:  # ordered by their ends, as the lanes report them
                trace(op)
    except OSError as error:
        raise RunDirectoryError(
            f"trace: {path} cannot be written ({error.strerror}); give another file with --trace"
        ) from error
    return path
