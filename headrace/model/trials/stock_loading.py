"""How stock transformers loads coded matrices of an architecture, found on a tiny instance.

A coded linear module has no `weight` until the first forward pass, unless config.json asks for decoding while files are read.
"""

import torch
from torch import nn
from transformers.quantizers import base

from headrace.model.parts.runner import Runner
from headrace.model.trials.trial import tried


@tried
@torch.no_grad()
def reads_weights_at_load(runner: Runner) -> bool:
    """Return whether the code of an architecture asks for `weight` of linear modules in its blocks while it is loaded."""
    model = runner.model
    for block in runner.blocks:
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
