"""Training: a run begins, steps, is flushed, resumed and exported."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.engine.seams import Seams as Seams
    from headrace.engine.trainer import Engine as Engine

__getattr__ = lazy_face(__name__)
