"""Compares, on a tiny instance, a model of several parts with its text model alone, on text.

Many whole models put their own head on the bare text model. Not all do there what the text model's own class does, such as
scaling logits. Invariant: a text model is trained for the loss that the whole model has on the same text.
"""

import copy
from typing import Any

import torch
from torch import nn

from headrace.model.blocks.skeleton import build_whole
from headrace.model.blocks.text_part import names_in_whole
from headrace.model.trials.block_major import RELATIVE_TOLERANCE
from headrace.model.trials.instance import tiny_model
from headrace.model.trials.thresholds import architecture_key
from headrace.model.trials.trial import Found, furthest, why_other
from headrace.terms.errors import ModelError

_TOKENS = 12


@torch.no_grad()
def check_whole(config: Any, whole: Any | None) -> None:
    """Check that logits agree, in float32. `config` is the text model's; without a whole model there is nothing to compare.

    Raises:
        ModelError: they differ, or the whole model cannot be made tiny or does not run on text alone.
    """
    if whole is None:
        return
    text = tiny_model(type(config), architecture_key(config)).eval()
    tiny = build_whole(type(whole), _with_text(whole.config, text.config)).eval()
    _share(text, tiny)
    ids = _tokens(tiny.config, text.get_input_embeddings().weight.shape[0])

    def logits(model: Any) -> list[Found]:
        return [{"": model(input_ids=ids, use_cache=False).logits}]

    def differing(own: Found, ours: Found) -> str:
        difference, largest = furthest(own[""], ours[""]), float(own[""].abs().max())
        if difference <= RELATIVE_TOLERANCE * largest:
            return ""
        return (
            f"computes other logits from text than its text model alone, {type(text).__name__}. They differ by "
            f"{difference:.2g}, and the largest is {largest:.2g}; it cannot be trained as a part"
        )

    # Its own code may want pictures, and finds parts without weights.
    fails = "cannot be compared with its text model, because it does not run on text alone: {}"
    if reason := why_other(lambda: logits(text), lambda: logits(tiny), differing, fails=fails):
        raise ModelError(f"{type(whole).__name__}: {reason}")


def _with_text(config: Any, text: Any) -> Any:
    """Return a copy of a whole model's configuration with `text` as its text model."""
    config = copy.deepcopy(config)
    replaced = config.get_text_config()
    for holder in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for name in getattr(holder, "sub_configs", ()):
            if getattr(holder, name, None) is replaced:
                setattr(holder, name, copy.deepcopy(text))
                return config
    raise ModelError(f"{type(config).__name__}: its text model's configuration is not where it is searched")


def _share(text: Any, whole: Any) -> None:
    """Give the whole model the text model's parameters and buffers; the others are not needed, and become empty tensors.

    They cannot stay on the meta device: some models send what they compute to the device of their first parameter.
    """
    own = {**dict(text.named_parameters(remove_duplicate=False)), **dict(text.named_buffers())}
    names = names_in_whole(text, whole)
    for inside in [*names, *(name for name, _ in whole.named_parameters() if name not in names)]:
        module, _, leaf = inside.rpartition(".")
        value = own[names[inside]] if inside in names else nn.Parameter(torch.empty(0, dtype=torch.float32))
        setattr(whole.get_submodule(module), leaf, value)


def _tokens(config: Any, vocabulary: int) -> torch.Tensor:
    """Return tokens of text: none that the whole model takes as the place of a picture or sound."""
    marks = {value for name, value in config.to_dict().items() if "token" in name and isinstance(value, int)}
    ids = torch.tensor([number for number in range(2, vocabulary) if number not in marks])
    return ids[torch.randint(len(ids), (1, _TOKENS), generator=torch.Generator().manual_seed(1))]
