"""How stock transformers loads coded matrices of an architecture, found on a tiny instance.

A coded linear module has no `weight` until the first forward pass, unless config.json asks for decoding while files are read.
"""

from collections.abc import Hashable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import nn
from transformers.quantizers import base

from headrace.model.blocks.find_blocks import find_blocks
from headrace.model.trials.instance import tiny_model
from headrace.model.trials.thresholds import architecture_key


def reads_weights_at_load(config: Any) -> bool:
    """Return whether the code of an architecture asks for `weight` of linear modules in its blocks while it is loaded."""
    return _reads_weights(cast(Hashable, type(config)), architecture_key(config))


@lru_cache(maxsize=64)
@torch.no_grad()
def _reads_weights(config_class: type, key: str) -> bool:
    model = tiny_model(config_class, key)
    for block in find_blocks(model).modules:
        for module in block.modules():
            if isinstance(module, nn.Linear):
                del module.weight
    for module in model.modules():
        module._is_hf_initialized = False
    try:
        model.initialize_weights()
    except AttributeError:
        return True
    return False


def replaced_for_codes(model: nn.Module) -> str | None:
    """Return the class of a module that transformers replaces, with other names, in models coded in compressed-tensors. None if
    there is none.
    """
    table = getattr(base, "MODULES_TO_PATCH_FOR_QUANTIZATION", {})
    kinds = {
        name
        for name, way in table.items()
        if any(str(getattr(method, "value", method)) == "compressed-tensors" for method in way["quantization_methods"])
    }
    return next((type(module).__name__ for module in model.modules() if type(module).__name__ in kinds), None)
