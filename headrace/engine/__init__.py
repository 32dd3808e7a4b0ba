"""The parts together: open, step, flush, resume, export."""

from headrace.engine.seams import Seams
from headrace.engine.trainer import Engine

__all__ = ["Engine", "Seams"]
