"""Tiny instances of architectures, and the rows that they are tried on.

Invariant: an instance is a function of the configuration's class and shrunk values, weights included.
"""

import json
from typing import Any

import torch

from headrace.model.blocks.building import model_from
from headrace.model.blocks.chain_values import MicroBatch
from headrace.model.blocks.why_not_built import why_not_built
from headrace.terms.errors import ModelError

# Two samples of unequal length, longer than the tiny sliding window, so that windows and packing are seen.
LENGTHS = (13, 10)


def tiny_model(config_class: type, key: str) -> Any:
    """Return a tiny float32 instance of an architecture, in training mode, with weights away from their initial values."""
    values = {name: value for name, value in json.loads(key).items() if name not in ("transformers_version", "dtype")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            config = config_class(**values)
            config.use_cache = False
            model = model_from(config, dtype=torch.float32)
        except Exception as error:  # whatever the architecture's own code raises for sizes it cannot have
            raise ModelError(
                f"{config_class.__name__}: cannot build a tiny instance for checking: {why_not_built(values, error)}"
            ) from error
        with torch.no_grad():
            for parameter in model.parameters():  # near their initial values, mistakes would be invisible
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.float().train()


def tiny_samples(model: Any, seed: int = 1) -> list[MicroBatch]:
    """Return two samples of unequal length for a tiny instance; others for another `seed`."""
    generator = torch.Generator().manual_seed(seed)
    high = model.get_input_embeddings().weight.shape[0]
    ids = [torch.randint(2, high, (1, length), generator=generator) for length in LENGTHS]
    return [MicroBatch(sample, sample, torch.ones_like(sample)) for sample in ids]
