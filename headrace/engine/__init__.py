"""Training: a run begins, steps, is flushed, resumed and exported; the node and its workers.

Exports are imported at their first use: generation and compression use the opener (`open_model.py`) without the code that
trains.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.engine.seams import Seams
    from headrace.engine.trainer import Engine

__all__ = ["Engine", "Seams"]


def __getattr__(name: str) -> Any:
    homes = {"Engine": "trainer", "Seams": "seams"}
    if name in homes:
        return getattr(import_module(f"headrace.engine.{homes[name]}"), name)
    raise AttributeError(f"module 'headrace.engine' has no attribute {name!r}")
