"""Adapters in peft's files: `adapter_config.json` and `adapter_model.safetensors`, written; `adapter_reading` reads them.

Invariant: stock peft loads what is written here, and gives the logits that the blocks gave.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from headrace.model.adapters.adapter_config import CONFIG_NAME
from headrace.model.adapters.adapter_targets import (
    DOWN,
    MAGNITUDE,
    UP,
    Product,
    Stack,
    is_linear,
    is_taken_for_experts,
    is_target,
    stacks_of,
)
from headrace.model.adapters.adapters import Adapters
from headrace.model.adapters.beside_files import PREFIX, write_beside
from headrace.model.blocks.text_part import names_in_whole
from headrace.model.chain.chain import Chain
from headrace.model.directory.matching import WeightMap


def write_adapters(
    out: Path, adapters: Adapters, chain: Chain, weights: WeightMap, read: Callable[[int], Tensor], notes: Mapping[str, str]
) -> None:
    """Write a directory of adapters, which appears whole or not at all; `read` gives a unit's tensors, flat, in the layout
    that `adapters` has. `notes` are texts by the names of the files that get them. A README has the adapters' own.

    Raises:
        RunDirectoryError, ExportFailed: as `appearing_model`.
    """
    names = _names_in_files(chain, weights)
    stacks = [each.name for found in adapters.products.values() for each in found if isinstance(each, Stack)]
    keys = _keys(chain, names, stacks, weights.stored_model)
    config = {CONFIG_NAME: json.dumps(_config(adapters, weights, names), indent=2) + "\n"}
    write_beside(out, adapters, keys, weights, lambda unit: adapters.tensors(unit, read(unit)), config | dict(notes))


def _config(adapters: Adapters, weights: WeightMap, names: Mapping[str, str]) -> dict[str, Any]:
    settings, stored = adapters.settings, weights.stored_model
    every = [each for found in adapters.products.values() for each in found]
    by_parameter = {each.name for each in every if _is_named_by_parameter(each, adapters, stored.config.model_type)}
    modules = {names[each.name] for each in every if each.name not in by_parameter}
    parameters = sorted(_parameter_of(each, names) for each in every if each.name in by_parameter)
    ends = sorted({name.rpartition(".")[2] for name in modules})
    # Named by the ends of names where these match the same modules everywhere in the model.
    matched = {name for name, _ in stored.named_modules() if modules and is_target(name, ends)}
    excluded = list(settings.excluded)
    alike = {name for name in matched if not (excluded and is_target(name, excluded))} == modules
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(weights.checkpoint.directory),
        "r": settings.rank,
        "lora_alpha": settings.scale * settings.rank,
        # peft knows none for what is named by its parameter; it would act in training alone.
        "lora_dropout": 0.0 if parameters else settings.dropout,
        "target_modules": ends if alike else sorted(modules),
        "exclude_modules": excluded or None,
        "target_parameters": parameters or None,
        "use_dora": settings.has_magnitudes,
        "bias": "none",
        "fan_in_fan_out": any(each.transposed for each in every if not isinstance(each, Stack)),
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _is_named_by_parameter(product: Product, adapters: Adapters, model_type: str) -> bool:
    """Return whether peft reads the adapter of a product only by the name of its parameter. That holds for packed experts, and
    for linear modules that peft mistakes for them. DoRA has no such form.
    """
    taken = is_taken_for_experts(product, model_type) and not adapters.settings.has_magnitudes
    return isinstance(product, Stack) or taken


def _parameter_of(product: Product, names: Mapping[str, str]) -> str:
    return names[product.name] if isinstance(product, Stack) else f"{names[product.name]}.weight"


def _names_in_files(chain: Chain, weights: WeightMap) -> Mapping[str, str]:
    """Return the names that linear modules and packed experts have in the stored model, by their names here."""
    stored = weights.stored_model
    own = [name for name, module in chain.model.named_modules() if is_linear(module)]
    if stored is chain.model:
        return {name: name for name in (*own, *_stacks(chain))}
    inside = {ours: name for name, ours in names_in_whole(chain.model, stored).items()}
    known = {name: inside.get(f"{name}.weight") for name in own}
    found = {name: whole.removesuffix(".weight") for name, whole in known.items() if whole is not None}
    return found | {name: inside[name] for name in _stacks(chain) if name in inside}


def _stacks(chain: Chain) -> list[str]:
    return [each.name for layout in chain.layouts for each in stacks_of(chain.model, layout)]


def _keys(chain: Chain, names: Mapping[str, str], stacks: Sequence[str], stored: nn.Module) -> dict[str, str]:
    """Return how the file calls the tensors that adapters may have, by their names here; of packed experts those of `stacks`.

    peft wraps a module once for each parameter that is adapted, in their order: the last one is outermost. It renames what it
    reads by the rules for weights of the model that is `stored`.
    """
    modules = [name for name, module in chain.model.named_modules() if is_linear(module)]
    places = {name: names.get(name, name) for name in modules}
    for number, name in enumerate(stacks):
        owner = name.rpartition(".")[0]
        within = sum(other.rpartition(".")[0] == owner for other in stacks[number + 1 :])
        places[name] = names.get(name, name).rpartition(".")[0] + ".base_layer" * within
    before = _before_renaming(stored)
    ends = (DOWN, UP, MAGNITUDE)
    return {f"{name}.{end}": f"{PREFIX}{before(f'{place}.{end}')}" for name, place in places.items() for end in ends}


def _before_renaming(stored: nn.Module) -> Callable[[str], str]:
    """Return a function from the name of a tensor to one that becomes it by transformers' rules for a model's weights.

    Most rules leave today's names alone. Some take them for older ones, too: what is written then is the older name.
    """
    rules = [rule for rule in get_model_conversion_mapping(stored) if isinstance(rule, WeightRenaming)]
    back = [rule.reverse_transform() for rule in reversed(rules)]

    def before(name: str) -> str:
        if rename_source_key(name, rules, [])[0] == name:
            return name
        older = rename_source_key(name, back, [], reverse=True)[0]
        return older if rename_source_key(older, rules, [])[0] == name else name

    return before
