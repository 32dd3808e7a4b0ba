"""Find the repeated blocks of a causal language model, or say why it cannot be done.

Invariant: the result is the one outermost module list whose members transformers itself treats as indivisible. An ambiguous
model is refused, never guessed.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.modeling_layers import GradientCheckpointingLayer

from headrace.terms.errors import ModelError, in_one_line


@dataclass(frozen=True, slots=True)
class Blocks:
    """The repeated blocks: the dotted name of their list in the model, and the modules in order."""

    name: str
    modules: tuple[nn.Module, ...]


def check_architecture(config: Any) -> None:
    """Refuse configurations that do not describe a plain causal language model of transformers.

    Raises:
        ModelError: no layers, encoder-decoder, remote code, quantised weights, layer dropping, or no causal language model
            class.
    """
    name = f"{type(config).__name__} (model_type {getattr(config, 'model_type', None)!r})"
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model; only decoder-only causal language models can be fine-tuned")
    if any(getattr(config, key, None) is not None for key in ("decoder_layers", "num_decoder_layers")):
        raise ModelError(
            f"{name} describes the decoder of an encoder-decoder model, made to attend to what an encoder returns. Such a "
            "decoder cannot be used alone: take a model that has only a decoder, such as Llama or Qwen"
        )
    text = text_config(config)
    for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if isinstance(size := getattr(text, key, None), int) and size < 1:
            written = dict(getattr(config, "attribute_map", {})).get(key, key)
            raise ModelError(f"{name}: {written} is {size} in its configuration; it must be at least 1")
    if text is not config:
        reason = (
            f"transformers has no causal language model for its text part ({type(text).__name__}) alone, and only that is "
            "trained. Take a model whose text part has one, such as those in docs/features.md"
        )
        if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
            reason = f"its architectures ({config.architectures}) are no class of the installed transformers for it"
        raise ModelError(f"{name} describes a model of several parts ({', '.join(config.sub_configs)}), and {reason}")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{name} has no causal language model class in the installed transformers; "
            "remote code is never run: use an architecture of transformers, or a newer transformers"
        )
    if getattr(config, "quantization_config", None) is not None:
        method = quantisation_of(config)
        raise ModelError(f"{name} holds quantised weights ({method}); give the model with float32, float16 or bfloat16 weights")
    layer_drop = getattr(config, "layerdrop", 0.0) or 0.0
    if layer_drop > 0:
        raise ModelError(f"{name} has layerdrop {layer_drop}: blocks skipped at random are not supported; set it to 0")


def text_config(config: Any) -> Any:
    """Return the configuration of the text part of a model; the part may be the whole.

    Raises:
        ModelError: the model has several, and none of them is the one to train.
    """
    try:
        return config.get_text_config()
    except ValueError as error:
        raise ModelError(
            f"{type(config).__name__} describes a model of several parts with text, and transformers does not say which is the "
            f"language model ({in_one_line(error).split('.')[0]}); give a model with one"
        ) from error


def quantisation_of(config: Any) -> str:
    """Return the method that the `quantization_config` of a configuration names."""
    method = config.quantization_config
    return str(method.get("quant_method")) if isinstance(method, dict) else type(method).__name__


def find_blocks(model: nn.Module) -> Blocks:
    """Return the decoder blocks of `model`.

    Candidates are the outermost module lists whose members all are of a class in `_no_split_modules`. They are checked against
    the lists of `GradientCheckpointingLayer`s, transformers' own mark of a repeated layer.

    Raises:
        ModelError: none or several are found, or the two marks disagree; the message names the lists.
    """
    indivisible = set(getattr(model, "_no_split_modules", None) or ())
    lists = _outermost_lists(model)
    by_class = {name for name, members in lists.items() if all(type(member).__name__ in indivisible for member in members)}
    by_layer = {
        name for name, members in lists.items() if all(isinstance(member, GradientCheckpointingLayer) for member in members)
    }
    found = by_class & by_layer or (by_class or by_layer if not (by_class and by_layer) else set())
    if len(found) != 1:
        described = ", ".join(f"{name} ({len(members)} x {type(members[0]).__name__})" for name, members in lists.items())
        raise ModelError(
            f"{type(model).__name__}: expected one list of decoder blocks, found {sorted(found) or 'none'}. Indivisible "
            f"modules are {sorted(indivisible)}, module lists are {described or 'none'}; this architecture cannot be split "
            "into blocks"
        )
    name = found.pop()
    return Blocks(name, tuple(lists[name]))


def block_of(name: str, blocks_name: str) -> int | None:
    """Return the index of the block of the list `blocks_name` that a parameter is in, None if in none."""
    if not name.startswith(f"{blocks_name}."):
        return None
    return int(name[len(blocks_name) + 1 :].split(".", 1)[0])


def refuse_shared_between_blocks(model: nn.Module, blocks_name: str) -> None:
    """Raise `ModelError` if a parameter belongs to several blocks, or to one and to what lies outside."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if block_of(name, blocks_name) != block_of(other, blocks_name):
            raise ModelError(
                f"{type(model).__name__}: {other} and {name} are one parameter. Its blocks share some, and would have to be "
                "in memory together; such models are not supported"
            )


def _outermost_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return non-empty module lists that lie in no other module list, by name."""
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and not any(name.startswith(f"{outer}.") for outer in lists):
            lists[name] = module
    return lists
