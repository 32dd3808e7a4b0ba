"""Models of several parts, text beside pictures or sound: their text model is trained, the rest stays as it came.

Nothing of an architecture is written down here. The text model is what transformers makes of the text part's configuration; its
class finds it in the whole model. Invariant: every parameter of the text model has one place in the whole one.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import transformers
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedModel

from headrace.model.blocks.binding import is_tied, parameter_aliases
from headrace.model.blocks.find_blocks import text_config
from headrace.model.blocks.skeleton import build_whole
from headrace.terms.errors import ModelError


def text_part(config: Any) -> tuple[Any, Any | None]:
    """Return the configuration of the model that is trained, and the skeleton of the whole model if that is only a part of it.

    A model of one part comes back as it is. So does one whose text part has no causal language model in transformers
    (`check_architecture` refuses it).

    Raises:
        ModelError: transformers cannot build the whole model.
    """
    if getattr(config, "is_encoder_decoder", False):
        return config, None
    text = text_config(config)
    model_class = _class_of(config)
    if text is config or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING or model_class is None:
        return config, None
    whole = build_whole(model_class, config)
    text = copy.deepcopy(text)
    text.tie_word_embeddings = _is_tied(whole)  # the whole model's configuration decides; in files the part's often lacks it
    if getattr(config, "quantization_config", None) is not None:
        text.quantization_config = config.quantization_config
    return text, whole


def _is_tied(whole: Any) -> bool:
    try:
        return is_tied(whole)
    except (NotImplementedError, AttributeError) as error:  # for some models transformers defines no embedding
        raise ModelError(f"{type(whole).__name__}: no language model: {error}") from error


def note_on(whole: Any) -> str:
    """Return what a person should know about a run whose model is a part of `whole`."""
    return f"of {type(whole).__name__} the text model is trained; its other parts stay as they are"


def names_in_whole(text: Any, whole: Any) -> Mapping[str, str]:
    """Return the names of the text model's parameters and persistent buffers, by their names in the whole model.

    Raises:
        ModelError: the text model is missing, occurs several times, or differs; the message says which.
    """
    names = dict(_pairs(text, whole))
    inside, own = whole.state_dict(), text.state_dict()
    aliases = parameter_aliases(text)
    placed = {aliases.get(name, name) for name in names.values()}
    lacking = sorted({aliases.get(name, name) for name in own} - placed)
    differing = sorted(name for name, ours in names.items() if inside[name].shape != own[ours].shape)
    if lacking or differing:
        raise ModelError(
            f"{type(whole).__name__}: the parameters of its text model are not those of {type(text).__name__}: "
            f"{', '.join((lacking or differing)[:3])}; this model cannot be trained as a part"
        )
    return names


def _pairs(text: Any, whole: Any) -> Iterator[tuple[str, str]]:
    """Yield names in the whole model and in the text model: of all of it, or of the base model and then of the head."""
    own = text.state_dict()
    found = _modules_of(whole, type(text))
    if not found:
        base = text.base_model
        below = next(name for name, module in text.named_modules() if module is base)
        found = _modules_of(whole, type(base))
        own = {name[len(below) + 1 :]: value for name, value in own.items() if name.startswith(f"{below}.")}
        yield from _head_pairs(text, whole)
    else:
        below = ""
    if len(found) != 1:
        raise ModelError(
            f"{type(whole).__name__}: its text model should be one {type(text).__name__} or {type(text.base_model).__name__}, "
            f"found {found or 'none'}; this model cannot be trained as a part"
        )
    inside = whole.state_dict()
    for name in own:
        if f"{found[0]}.{name}" in inside:
            yield f"{found[0]}.{name}", f"{below}.{name}" if below else name


def _head_pairs(text: Any, whole: Any) -> Iterator[tuple[str, str]]:
    heads = [model.get_output_embeddings() for model in (whole, text)]
    if all(isinstance(head, nn.Module) for head in heads):
        inside, own = (
            next(name for name, module in model.named_modules() if module is head)
            for model, head in zip((whole, text), heads, strict=True)
        )
        yield from ((f"{inside}.{name}", f"{own}.{name}") for name in heads[0].state_dict())


def _modules_of(model: nn.Module, kind: type) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is kind]


def _class_of(config: Any) -> type[PreTrainedModel] | None:
    """Return the class of the whole model: transformers' for pictures and text, else the one that the files name."""
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        model_class: type[PreTrainedModel] = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        return model_class
    named_classes = config.architectures if isinstance(config.architectures, list) else ()
    for name in named_classes:
        named = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(named, type) and issubclass(named, PreTrainedModel) and getattr(named, "config_class", 0) is type(config):
            return named
    return None
