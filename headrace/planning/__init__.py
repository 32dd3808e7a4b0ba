"""From a model's config.json and a machine to a plan with its times, its wear and what else would fit. No weights needed."""

from headrace.planning.allowances import default_device_bytes, default_host_bytes, default_ssd_bytes
from headrace.planning.answer import plan_model
from headrace.planning.config import read_config
from headrace.planning.explain import explain
from headrace.planning.report import Alternative, PlanReport

__all__ = [
    "Alternative",
    "PlanReport",
    "default_device_bytes",
    "default_host_bytes",
    "default_ssd_bytes",
    "explain",
    "plan_model",
    "read_config",
]
