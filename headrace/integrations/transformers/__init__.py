"""transformers: a `Trainer` whose step is the engine's (docs/trainer.md). It needs the extra `trainer`."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.integrations.transformers.trainer import HeadraceTrainer as HeadraceTrainer

__getattr__ = lazy_face(__name__)
