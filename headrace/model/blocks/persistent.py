"""Takes buffers that belong to a checkpoint (router corrections, tables of hashes), and a configuration, from one process to
another.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING

from headrace.terms.errors import ModelError


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return those buffers of `model` that checkpoints contain, by name, on the host."""
    stored = model.state_dict().keys()
    return {name: buffer.cpu() for name, buffer in model.named_buffers() if name in stored}


def set_buffers(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Set the buffers of `model` to those of another model of its kind.

    Raises:
        ModelError: it has other buffers.
    """
    own = persistent_buffers(model)
    if {name: each.shape for name, each in own.items()} != {name: each.shape for name, each in buffers.items()}:
        raise ModelError(
            f"buffers: expected {sorted(own)}, found {sorted(buffers)}, or of other shapes; is it the same version?"
        )
    for name, buffer in buffers.items():
        model.get_buffer(name).copy_(buffer)


def config_from(values: Mapping[str, Any]) -> Any:
    """Return the configuration whose `to_dict` gave `values`.

    Raises:
        ModelError: this version of transformers does not know the architecture.
    """
    kind = str(values.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise ModelError(
            f"model_type {kind!r} is unknown to the transformers that is installed here; install the node's version"
        )
    return CONFIG_MAPPING[kind].from_dict(dict(values))
