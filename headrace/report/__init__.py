"""Events become progress, JSON lines, trainer state, TensorBoard and timelines. Each reporter is a sink: a callable."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.report.card import CardFacts as CardFacts
    from headrace.report.card import model_card as model_card
    from headrace.report.lanes import LanesFile as LanesFile
    from headrace.report.lanes import read_recording as read_recording
    from headrace.report.metrics import MetricsFile as MetricsFile
    from headrace.report.metrics import evaluation_record as evaluation_record
    from headrace.report.metrics import metrics_record as metrics_record
    from headrace.report.metrics import read_metrics as read_metrics
    from headrace.report.metrics import ssd_bytes as ssd_bytes
    from headrace.report.metrics import steady_ssd_bytes as steady_ssd_bytes
    from headrace.report.progress import LineProgress as LineProgress
    from headrace.report.progress import LiveProgress as LiveProgress
    from headrace.report.sinks import Reporter as Reporter
    from headrace.report.sinks import Reporters as Reporters
    from headrace.report.tensorboard import TensorBoard as TensorBoard
    from headrace.report.trace_file import TraceFile as TraceFile
    from headrace.report.trainer_state import TrainerStateFile as TrainerStateFile

__getattr__ = lazy_face(__name__)
