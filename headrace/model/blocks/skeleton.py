"""Build a model of transformers without its weights: parameters on the meta device, buffers real.

Invariant: no weight is ever materialised, however large the model. Every buffer (rotary tables, embedding scales, router
corrections) holds the value that the architecture gives it, because most are in no checkpoint.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from headrace.model.blocks.building import BUILDING, model_from
from headrace.model.blocks.find_blocks import check_architecture
from headrace.model.blocks.why_not_built import why_not_built
from headrace.terms.errors import ModelError

# A large uninitialised tensor is a weight, not a table. So is a large one of three dimensions (experts). Both are made on the
# meta device. Otherwise constructing Llama 4 Scout writes 200 GB of zeros, one block at a time (141 s measured).
_LARGE_ELEMENTS = 1 << 20
_FILLED = (torch.zeros, torch.ones, torch.randn, torch.rand)


class _LargeOnMeta(TorchFunctionMode):
    """Make large tensors that can only be weights on the meta device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if (func is torch.empty or func in _FILLED) and kwargs.get("device") is None:
            shape = kwargs.get("size", args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args)
            if torch.Size(shape).numel() >= _LARGE_ELEMENTS and (func is torch.empty or len(shape) > 2):
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
    """Replace a parameter that is being registered by one on the meta device."""
    if parameter is None or parameter.device.type == "meta":
        return None
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


def build_skeleton(config: Any, dtype: torch.dtype) -> Any:
    """Return the causal language model that `config` describes, in training mode, without weights.

    The configuration is copied; attention is `sdpa` where the architecture has it, the key-value cache is off. Router logits
    are not collected by the model (the chain does): the flag is cleared in the copy.

    Raises:
        ModelError: the architecture is refused, or transformers cannot build it from this configuration.
    """
    check_architecture(config)
    config = copy.deepcopy(config)
    config.use_cache = False
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False
    with _without_weights():
        model = _from_config(config, dtype)
    _keep_buffers_exact(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.train()


def build_whole(model_class: type[PreTrainedModel], config: Any) -> Any:
    """Return a model of several parts without weights, for the names, shapes and ties of its parameters; it cannot run.

    Raises:
        ModelError: transformers cannot build it from this configuration.
    """
    with _without_weights():
        try:
            return model_class(copy.deepcopy(config))
        except Exception as error:  # whatever a broken configuration or a missing library triggers
            raise ModelError(
                f"{model_class.__name__}: transformers cannot build the model: {why_not_built(config.to_dict(), error)}"
            ) from error


@contextmanager
def _without_weights() -> Iterator[None]:
    """While entered, modules that are constructed have their parameters on the meta device."""
    with ExitStack() as stack:
        stack.enter_context(BUILDING)  # for the hook below, too, belongs to the whole process
        stack.enter_context(torch.random.fork_rng(devices=[]))  # construction must not move the caller's generator
        stack.callback(register_module_parameter_registration_hook(_to_meta).remove)
        stack.enter_context(_LargeOnMeta())
        yield


def _from_config(config: Any, dtype: torch.dtype) -> Any:
    def made(attention: str) -> Any:
        return model_from(config, dtype=dtype, attn_implementation=attention)

    try:
        try:
            return made("sdpa")
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            return made("eager")
    except Exception as error:  # whatever a broken configuration triggers inside the architecture's own code
        raise ModelError(
            f"{type(config).__name__}: transformers cannot build the model: {why_not_built(config.to_dict(), error)}"
        ) from error


def _keep_buffers_exact(model: Any) -> None:
    """Check that buffers have values, and keep in float32 those that the architecture wants so.

    Raises:
        ModelError: a buffer has no value without the weights.
    """
    keep = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for module_name, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            full_name = f"{module_name}.{name}"
            if buffer.device.type == "meta":
                raise ModelError(f"{type(model).__name__}: buffer {full_name} has no value of its own; not supported")
            if buffer.is_floating_point() and any(part in full_name.split(".") for part in keep):
                module._buffers[name] = buffer.float()
