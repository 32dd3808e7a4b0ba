"""Events become progress, JSON lines, trainer state, TensorBoard and timelines. Each reporter is a sink: a callable."""

from headrace.report.card import CardFacts, model_card
from headrace.report.lanes import LanesFile, read_recording
from headrace.report.metrics import MetricsFile, metrics_record, read_metrics, ssd_bytes, steady_ssd_bytes
from headrace.report.progress import LineProgress, LiveProgress
from headrace.report.sinks import Reporter, Reporters
from headrace.report.tensorboard import TensorBoard
from headrace.report.trace_file import TraceFile
from headrace.report.trainer_state import TrainerStateFile, trainer_state

__all__ = [
    "CardFacts",
    "LanesFile",
    "LineProgress",
    "LiveProgress",
    "MetricsFile",
    "Reporter",
    "Reporters",
    "TensorBoard",
    "TraceFile",
    "TrainerStateFile",
    "metrics_record",
    "model_card",
    "read_metrics",
    "read_recording",
    "ssd_bytes",
    "steady_ssd_bytes",
    "trainer_state",
]
