"""transformers: a `Trainer` whose step is the engine's (docs/trainer.md). It needs the extra `trainer`."""

from headrace.integrations.transformers.trainer import HeadraceTrainer

__all__ = ["HeadraceTrainer"]
