"""From a model's config.json and a machine to a plan with its times, its wear and what else would fit. No weights needed."""

from headrace.planning.allowances import default_device_bytes, default_host_bytes
from headrace.planning.answer import plan_model, report_of
from headrace.planning.config import read_parts
from headrace.planning.explain import explain, explain_outcome
from headrace.planning.outcome import Outcome, OutcomeRow, outcome_of
from headrace.planning.report import Alternative, PlanReport

__all__ = [
    "Alternative",
    "Outcome",
    "OutcomeRow",
    "PlanReport",
    "default_device_bytes",
    "default_host_bytes",
    "explain",
    "explain_outcome",
    "outcome_of",
    "plan_model",
    "read_parts",
    "report_of",
]
