"""Events become progress, JSON lines, trainer state, TensorBoard and timelines. Each reporter is a sink: a callable."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.report.card import CardFacts, model_card
    from headrace.report.lanes import LanesFile, read_recording
    from headrace.report.metrics import (
        MetricsFile,
        evaluation_record,
        metrics_record,
        read_metrics,
        ssd_bytes,
        steady_ssd_bytes,
    )
    from headrace.report.progress import LineProgress, LiveProgress
    from headrace.report.sinks import Reporter, Reporters
    from headrace.report.tensorboard import TensorBoard
    from headrace.report.trace_file import TraceFile
    from headrace.report.trainer_state import TrainerStateFile

__getattr__ = lazy_face(__name__)
