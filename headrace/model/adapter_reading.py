"""Adapters out of peft's files, its own and older ones: which tensor belongs to what of a model.

Invariant: what is read computes what stock peft computes with the same files; what peft would pass over is refused by name.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from headrace.model.adapter_config import AdapterConfig
from headrace.model.adapter_targets import DOWN, MAGNITUDE, UP, Product, Stack, products_of, stacks_of
from headrace.model.adapters import Adapters
from headrace.model.chain import Chain
from headrace.model.matching import Index, WeightMap
from headrace.model.safetensors_file import StoredTensor, read_rows
from headrace.model.text_part import names_in_whole
from headrace.terms.errors import ConfigError, ModelError
from headrace.terms.layout import UnitLayout, part

PREFIX, WEIGHTS_NAME = "base_model.model.", "adapter_model"
_ENDS = (DOWN, UP, MAGNITUDE)


@dataclass(frozen=True)
class StoredAdapters:
    """Adapters that were read: what they are, and their tensors (float32) by unit, flat as `adapters.layouts` says."""

    adapters: Adapters
    flats: Mapping[int, Tensor]

    def bind(self, device: torch.device) -> None:
        """Bind all of them, on `device`."""
        for unit, layout in self.adapters.layouts.items():
            self.adapters.bind(unit, layout, self.flats[unit].to(device), None)


@dataclass(frozen=True, slots=True)
class _Place:
    """What a module or parameter that is called `name` in a file belongs to: `product` of `unit`, or `index` of it."""

    name: str
    unit: int
    product: Product
    index: Index = ()


def read_adapters(directory: Path, chain: Chain, weights: WeightMap) -> StoredAdapters:
    """Read the adapters in `directory` for the model of `chain`.

    Raises:
        ModelError: there are none, they are of another kind, or of another model; the message says which tensor.
    """
    config = AdapterConfig.read(directory)
    places = _Places(chain, weights, config)
    try:
        with safe_open(directory / f"{WEIGHTS_NAME}.safetensors", framework="pt") as file:
            found = _Found(directory, type(chain.model).__name__, file)
            for key in file.keys():  # noqa: SIM118
                stem, end = _split(key)
                if end in _ENDS and (place := places.of(stem)) is not None:
                    found.add(place, end, key)
                elif end in _ENDS and places.untargeted(stem):
                    raise ModelError(
                        f"{directory}: {key}: adapter_config.json does not choose {stem} (target_modules, exclude_modules, "
                        "layers_to_transform, target_parameters), and peft passes over it; correct one of them"
                    )
                else:
                    _check_copy(directory, key, places.stored.get(stem), weights, file)
            if config.starts_at_random and (lacking := places.lacking(found.names)):
                raise ModelError(f"{directory}: {lacking} has no tensors, and init_lora_weights makes some at random")
            return found.read(chain, config)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{directory}: {WEIGHTS_NAME}.safetensors cannot be read: {error}") from error
    except ConfigError as error:
        raise ModelError(f"{directory}: {error}; give the model that it was trained on") from error


def _split(key: str) -> tuple[str, str]:
    """Return the name of a module in a file, and which tensor of its adapter `key` is."""
    stem = key.removeprefix(PREFIX)
    for end in _ENDS:
        if stem.endswith(f".{end}"):
            return stem.removesuffix(f".{end}"), end
    return stem.replace(".base_layer.", "."), ""


class _Places:
    """The names that files may have for what of a model can have adapters, those of older versions of transformers, too."""

    def __init__(self, chain: Chain, weights: WeightMap, config: AdapterConfig) -> None:
        model, whole = chain.model, weights.stored_model
        # The names of parameters here, by those in the stored model.
        self.stored = {name: name for name in model.state_dict()} if whole is model else dict(names_in_whole(model, whole))
        head = whole.get_output_embeddings()
        self._head = (
            next((name for name, module in whole.named_modules() if module is head), None) if head is not None else None
        )
        self._config = config
        self._own_names = {ours: name.removesuffix(".weight") for name, ours in self.stored.items()}
        mapping = get_model_conversion_mapping(whole)
        self._renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
        self._rules = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._prefix, self._state = whole.base_model_prefix, whole.state_dict()
        self._adaptable = {own.parameter: (unit, own) for unit, layout in _units(chain) for own in adaptable_of(model, layout)}
        self._by_name: dict[str, _Place] = {}
        self._modules: dict[str, _Place] = {}
        for name, ours in self.stored.items():
            if ours in self._adaptable and name.endswith(".weight"):
                self._modules[name.removesuffix(".weight")] = _Place(name.removesuffix(".weight"), *self._adaptable[ours])
        self._by_parameter(whole)

    def _by_parameter(self, whole: nn.Module) -> None:
        """Name what `target_parameters` chooses: peft wraps a module once for each, in their order, the last one outermost."""
        for owner, module in whole.named_modules():
            names = [f"{owner}.{name}" for name, _ in module.named_parameters(recurse=False)]
            chosen = [name for name in names if self._config.targets_parameter(name)]
            for number, name in enumerate(chosen, start=1):
                if (known := self._adaptable.get(self.stored.get(name, ""))) is not None:
                    self._by_name[owner + ".base_layer" * (len(chosen) - number)] = _Place(name, *known)

    def of(self, stem: str) -> _Place | None:
        """Return what the adapter of `stem` belongs to, if the configuration chooses it."""
        if (place := self._by_name.get(stem)) is not None:
            return place
        place = self._place(stem)
        return place if place is not None and self._targets(stem, place) else None

    def untargeted(self, stem: str) -> bool:
        """Return whether `stem` could have an adapter, and the configuration does not choose it."""
        return self._place(stem) is not None

    def _place(self, stem: str) -> _Place | None:
        """Return what is called `stem`, now or in older versions of transformers: its own rules for weights say it."""
        if (place := self._modules.get(stem)) is not None:
            return place
        key = f"{stem}.weight"
        name, pattern = rename_source_key(key, self._renamings, self._converters, self._prefix, self._state)
        if pattern is None:
            return self._modules.get(name.removesuffix(".weight"))
        rule, (unit, product) = self._rules[pattern], self._adaptable.get(self.stored.get(name, ""), (0, None))
        kinds = [type(operation) for operation in rule.operations]
        expert = re.search(pattern.replace("*", r"(\d+)"), rename_source_key(key, self._renamings, [])[0])
        if kinds not in ([MergeModulelist], [MergeModulelist, Concatenate]) or expert is None or not expert.groups():
            return None
        if not isinstance(product, Stack) or product.transposed or int(expert[1]) >= product.experts:
            return None
        height, which = product.rows // len(rule.source_patterns), rule.source_patterns.index(pattern)
        return _Place(stem, unit, product, (int(expert[1]), slice(which * height, (which + 1) * height)))

    def lacking(self, found: set[str]) -> str | None:
        """Return a linear module that is chosen, and is not among the `found`."""
        linear = [place.product.name for stem, place in self._modules.items() if self._chosen_linear(stem, place)]
        return next((name for name in linear if name not in found), None)

    def _chosen_linear(self, stem: str, place: _Place) -> bool:
        return not isinstance(place.product, Stack) and self._targets(stem, place)

    def _targets(self, stem: str, place: _Place) -> bool:
        return any(self._config.targets(name, self._head) for name in {stem, self._own_names[place.product.parameter]})


class _Found:
    """Tensors of a file by what they belong to."""

    def __init__(self, directory: Path, model: str, file: Any) -> None:
        self._directory, self._model, self._file = directory, model, file
        self._keys: dict[tuple[int, str], dict[str, tuple[_Place, dict[str, str]]]] = {}

    @property
    def names(self) -> set[str]:
        """The names here of what has tensors."""
        return {name for _, name in self._keys}

    def add(self, place: _Place, end: str, key: str) -> None:
        """Note that the tensor `key` is one of the adapter of `place`."""
        of_product = self._keys.setdefault((place.unit, place.product.name), {})
        of_product.setdefault(place.name, (place, {}))[1][end] = key

    def read(self, chain: Chain, config: AdapterConfig) -> StoredAdapters:
        """Return the adapters with their tensors."""
        if not self._keys:
            raise ModelError(f"{self._directory}: it has no tensors for the blocks of {self._model}; give another model")
        order = {(unit, own.name): own for unit, layout in _units(chain) for own in adaptable_of(chain.model, layout)}
        products: dict[int, list[Product]] = {}
        parts: dict[str, list[_Part]] = {}
        for (unit, name), product in order.items():
            if (unit, name) in self._keys:
                parts[name] = found = _parts_of(self._directory, product, self._keys[unit, name].values(), config)
                ranked = replace(product, rank=sum(each.rank for each in found), scale=found[0].scale)
                products.setdefault(unit, []).append(ranked)
        adapters = Adapters.over(chain.layouts, config.settings, products)
        flats = {unit: torch.zeros(layout.num_elements) for unit, layout in adapters.layouts.items()}
        for unit, layout in adapters.layouts.items():
            views = {spec.name: part(flats[unit], spec).view(spec.shape) for spec in layout.parameters}
            for product in adapters.products[unit]:
                ends = product.shapes(config.settings)
                for each in parts[product.name]:
                    each.fill(product, {end: views[f"{product.name}.{end}"] for end in ends}, self._read)
        return StoredAdapters(adapters, flats)

    def _read(self, key: str, shape: Sequence[int]) -> Tensor:
        found: Tensor = self._file.get_tensor(key)
        if tuple(found.shape) != tuple(shape):
            raise ModelError(
                f"{self._directory}: {key}: found shape {tuple(found.shape)}, {self._model} with this adapter_config.json has "
                f"{tuple(shape)}; give the model that it was trained on"
            )
        return found


@dataclass(frozen=True, slots=True)
class _Part:
    """Adapters that share ranks `start` to `start + rank` of a product's: one of all of it, or those of each expert's Linear.

    `of_expert` are the keys by the number of an expert; -1 stands for all of them in one tensor.
    """

    start: int
    rank: int
    scale: float
    rows: slice
    of_expert: Mapping[int, Mapping[str, str]]

    def fill(self, product: Product, views: Mapping[str, Tensor], read: Any) -> None:
        """Read the tensors into `views` of the product's."""
        for expert, keys in self.of_expert.items():
            if lacking := [end for end in views if end not in keys]:
                raise ModelError(f"{next(iter(keys.values()))}: {lacking[0]} is missing beside it; the adapter is not whole")
            if expert < 0:
                for end, view in views.items():
                    view.copy_(read(keys[end], view.shape))
                continue
            assert isinstance(product, Stack), "only packed experts have numbers"
            down, up = product.factors(views[DOWN], views[UP])
            ranks = slice(self.start, self.start + self.rank)
            for end, whole in ((DOWN, down[expert, ranks]), (UP, up[expert, self.rows, ranks])):
                whole.copy_(read(keys[end], whole.shape))


def _parts_of(
    directory: Path, product: Product, found: Sequence[tuple[_Place, dict[str, str]]] | Any, config: AdapterConfig
) -> list[_Part]:
    """Return the adapters of a product as parts of one: peft makes one of those of gate_proj and up_proj of each expert."""
    pieces = list(found)
    whole = [(place, keys) for place, keys in pieces if place.index == ()]
    if whole:
        if len(pieces) > 1:
            raise ModelError(f"{directory}: {pieces[0][0].name} and {pieces[1][0].name} are adapters of one parameter")
        (place, keys) = whole[0]
        rank = config.rank(place.name)
        return [_Part(0, rank, config.scale(place.name, rank), slice(None), {-1: keys})]
    assert isinstance(product, Stack), "only packed experts have several pieces"
    kinds: dict[tuple[int, int], dict[int, tuple[str, dict[str, str]]]] = {}
    for place, keys in pieces:
        expert, rows = place.index
        assert isinstance(expert, int), "pieces of experts have their number"
        assert isinstance(rows, slice), "and their rows"
        kinds.setdefault((rows.start, rows.stop), {})[expert] = (place.name, keys)
    parts: list[_Part] = []
    for (start, stop), of_expert in sorted(kinds.items()):
        name = next(iter(of_expert.values()))[0]
        if len(of_expert) != product.experts:
            raise ModelError(
                f"{directory}: {name}: {len(of_expert)} of {product.experts} experts have adapters; it is not whole"
            )
        settings = {(rank := config.rank(each), config.scale(each, rank)) for each, _ in of_expert.values()}
        rank, scale = next(iter(settings))
        if len(settings) > 1 or (parts and parts[0].scale != scale) or (config.by_root and len(kinds) > 1):
            raise ModelError(
                f"{directory}: {name}: experts whose ranks or scales differ (rank_pattern, alpha_pattern, use_rslora) are not "
                "computed together; merge the adapter with the peft that trained it"
            )
        keys_of = {expert: keys for expert, (_, keys) in of_expert.items()}
        parts.append(_Part(sum(each.rank for each in parts), rank, scale, slice(start, stop), keys_of))
    return parts


def adaptable_of(model: nn.Module, layout: UnitLayout) -> Iterator[Product]:
    """Yield what of a unit adapters of others may be of: linear modules, packed experts, matrices of other modules."""
    found = [*products_of(model, layout), *stacks_of(model, layout)]
    known = {each.parameter for each in found}
    yield from found
    for spec in layout.parameters:
        if len(spec.shape) in (2, 3) and spec.name not in known:
            rows, columns = spec.shape[-2:]
            experts = spec.shape[0] if len(spec.shape) == 3 else 1
            yield Stack(spec.name, rows, columns, transposed=False, experts=experts)


def _units(chain: Chain) -> Iterator[tuple[int, UnitLayout]]:
    """Yield blocks and the head: what is before the blocks has no adapters."""
    return ((unit, layout) for unit, layout in enumerate(chain.layouts) if unit)


def _floats_of(stored: StoredTensor, rows: np.ndarray) -> Tensor:
    """Return rows of a stored tensor, given as its bits, in float32."""
    return (
        torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16) if stored.dtype == "BF16" else torch.from_numpy(rows)
    ).float()


def _check_copy(directory: Path, key: str, parameter: str | None, weights: WeightMap, file: Any) -> None:
    """Pass over a copy of the model's own weights, as peft saves of a head that has an adapter.

    Raises:
        ModelError: `key` is no such copy, or is another one.
    """
    pieces = [piece for piece in weights.pieces.get(parameter or "", ()) if piece.index == ()]
    if not pieces:
        model = type(weights.model).__name__
        raise ModelError(
            f"{directory}: {key!r} belongs to nothing in the blocks of {model}: the adapter is of another model, or adapts "
            "more than linear modules of blocks and heads; give the model that it was trained on"
        )
    own, found = weights.checkpoint.tensors[pieces[0].key], file.get_slice(key)
    if own.shape != tuple(found.get_shape()) or not all(
        torch.equal(_floats_of(own, rows), found[start:stop].float()) for start, stop, rows in read_rows(own)
    ):
        raise ModelError(
            f"{directory}: {key}: this adapter brings other weights for {parameter} than the model has, and peft puts them in "
            "their place; merge the adapter with peft, or give the model that it was trained on"
        )
