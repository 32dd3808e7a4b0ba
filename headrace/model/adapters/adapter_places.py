"""The names of modules and parameters in adapters' files, including those of older versions of transformers.

Invariant: a name belongs to what stock peft adapts under that name with the same configuration.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from headrace.model.adapters.adapter_config import AdapterConfig
from headrace.model.adapters.adapter_targets import Product, Stack, products_of, stacks_of
from headrace.model.blocks.text_part import names_in_whole
from headrace.model.chain.chain import Chain
from headrace.model.directory.matching import Index, WeightMap


@dataclass(frozen=True, slots=True)
class AdapterPlace:
    """What a module or parameter that is called `name` in a file belongs to: `product` of `unit`, or `index` of it."""

    name: str
    unit: int
    product: Product
    index: Index = ()


class AdapterPlaces:
    """The names that files may have for what of a model can have adapters, those of older versions of transformers, too."""

    def __init__(self, chain: Chain, weights: WeightMap, config: AdapterConfig) -> None:
        model, whole = chain.model, weights.stored_model
        # The names of parameters here, by those in the stored model.
        self.stored = {name: name for name in model.state_dict()} if whole is model else dict(names_in_whole(model, whole))
        head = whole.get_output_embeddings()
        self.head = next((name for name, module in whole.named_modules() if module is head), None) if head is not None else None
        self._config = config
        self._own_names = {ours: name.removesuffix(".weight") for name, ours in self.stored.items()}
        mapping = get_model_conversion_mapping(whole)
        self._renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
        self._rules = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._prefix, self._state = whole.base_model_prefix, whole.state_dict()
        self.adaptable = {own.parameter: (unit, own) for unit, own in _adaptable(chain)}
        self._by_name: dict[str, AdapterPlace] = {}
        self._modules: dict[str, AdapterPlace] = {}
        for name, ours in self.stored.items():
            if ours in self.adaptable and name.endswith(".weight"):
                self._modules[name.removesuffix(".weight")] = AdapterPlace(name.removesuffix(".weight"), *self.adaptable[ours])
        self._by_parameter(whole)

    def _by_parameter(self, whole: nn.Module) -> None:
        """Name what `target_parameters` chooses: peft wraps a module once for each, in their order, the last one outermost."""
        for owner, module in whole.named_modules():
            names = [f"{owner}.{name}" for name, _ in module.named_parameters(recurse=False)]
            chosen = [name for name in names if self._config.targets_parameter(name)]
            for number, name in enumerate(chosen, start=1):
                if (known := self.adaptable.get(self.stored.get(name, ""))) is not None:
                    self._by_name[owner + ".base_layer" * (len(chosen) - number)] = AdapterPlace(name, *known)

    def of(self, stem: str) -> AdapterPlace | None:
        """Return what the adapter of `stem` belongs to, if the configuration chooses it."""
        if (place := self._by_name.get(stem)) is not None:
            return place
        place = self._place(stem)
        return place if place is not None and self._targets(stem, place) else None

    def untargeted(self, stem: str) -> bool:
        """Return whether `stem` could have an adapter, and the configuration does not choose it."""
        return self._place(stem) is not None

    def _place(self, stem: str) -> AdapterPlace | None:
        """Return what is called `stem`, now or in older versions of transformers: its own rules for weights say it."""
        if (place := self._modules.get(stem)) is not None:
            return place
        key = f"{stem}.weight"
        name, pattern = rename_source_key(key, self._renamings, self._converters, self._prefix, self._state)
        if pattern is None:
            return self._modules.get(name.removesuffix(".weight"))
        rule, (unit, product) = self._rules[pattern], self.adaptable.get(self.stored.get(name, ""), (0, None))
        kinds = [type(operation) for operation in rule.operations]
        expert = re.search(pattern.replace("*", r"(\d+)"), rename_source_key(key, self._renamings, [])[0])
        if kinds not in ([MergeModulelist], [MergeModulelist, Concatenate]) or expert is None or not expert.groups():
            return None
        if not isinstance(product, Stack) or product.transposed or int(expert[1]) >= product.experts:
            return None
        height, which = product.rows // len(rule.source_patterns), rule.source_patterns.index(pattern)
        return AdapterPlace(stem, unit, product, (int(expert[1]), slice(which * height, (which + 1) * height)))

    def lacking(self, found: set[str]) -> str | None:
        """Return a linear module that is chosen, and is not among the `found`."""
        linear = [place.product.name for stem, place in self._modules.items() if self._chosen_linear(stem, place)]
        return next((name for name in linear if name not in found), None)

    def _chosen_linear(self, stem: str, place: AdapterPlace) -> bool:
        return not isinstance(place.product, Stack) and self._targets(stem, place)

    def _targets(self, stem: str, place: AdapterPlace) -> bool:
        return any(self._config.targets(name, self.head) for name in {stem, self._own_names[place.product.parameter]})


def _adaptable(chain: Chain) -> Iterator[tuple[int, Product]]:
    """Yield what adapters of others may be of, by unit: linear modules, packed experts, matrices of other modules."""
    for unit, layout in enumerate(chain.layouts):
        if unit == 0:  # what is before the blocks has no adapters
            continue
        found = [*products_of(chain.model, layout), *stacks_of(chain.model, layout)]
        known = {each.parameter for each in found}
        yield from ((unit, each) for each in found)
        for spec in layout.parameters:
            if len(spec.shape) in (2, 3) and spec.name not in known:
                rows, columns = spec.shape[-2:]
                experts = spec.shape[0] if len(spec.shape) == 3 else 1
                yield unit, Stack(spec.name, rows, columns, transposed=False, experts=experts)
