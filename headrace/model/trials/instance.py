"""Tiny instances of architectures, and the rows that they are tried on.

Invariant: an instance is a function of the configuration's class and shrunk values, weights included.
"""

import copy
import inspect
import json
from typing import Any

import torch

from headrace.model.blocks.building import model_from
from headrace.model.blocks.chain_values import MicroBatch
from headrace.model.blocks.find_blocks import find_blocks
from headrace.model.blocks.why_not_built import why_not_built
from headrace.model.parts.runner import Runner, left_as_found
from headrace.terms.errors import ModelError, in_one_line

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


def tiny_runner(config_class: type, key: str) -> Runner:
    """Return a tiny float32 instance of an architecture, ready to be run block by block."""
    model = tiny_model(config_class, key)
    blocks = find_blocks(model).modules
    seen: list[int | None] = []
    handle = blocks[0].register_forward_hook(
        lambda module, args, out: seen.append(len(out) if isinstance(out, tuple) else None)
    )
    try:
        with torch.no_grad(), left_as_found(model.modules()):
            model(input_ids=tiny_samples(model)[0].input_ids, use_cache=False, **_without_asides(model))
    except Exception as error:  # the architecture's own code, on sizes that it may not like
        raise ModelError(
            f"{config_class.__name__}: its tiny instance does not run: {in_one_line(error)}; untried models are not trained"
        ) from error
    finally:
        handle.remove()
    if not seen:
        raise ModelError(f"{config_class.__name__}: its forward does not call its first block")
    # On a copy, because it leaves hooks, which could not be compiled.
    collect = bool(getattr(model.config, "output_router_logits", False)) and _has_aside_loss(copy.deepcopy(model))
    model.config.output_router_logits = False
    return Runner(model, blocks, tuple_length=seen[0], collect_asides=collect)


@torch.no_grad()
def _has_aside_loss(model: Any) -> bool:
    """Return whether a model adds an auxiliary loss to its own; some have the switch for one, but no loss."""
    if "output_router_logits" not in inspect.signature(type(model).forward).parameters:
        return False
    ids = tiny_samples(model)[0].input_ids
    return isinstance(getattr(model(input_ids=ids, use_cache=False, output_router_logits=True), "aux_loss", None), torch.Tensor)


def _without_asides(model: Any) -> dict[str, Any]:
    return {"output_router_logits": False} if getattr(model.config, "output_router_logits", False) else {}
