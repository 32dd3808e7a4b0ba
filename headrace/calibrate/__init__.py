"""Measuring the ceilings of this machine: every part alone, and pairs of parts at once."""

from headrace.calibrate.base import Load, rate_of, rates_together
from headrace.calibrate.measure import measure_machine

__all__ = ["Load", "measure_machine", "rate_of", "rates_together"]
