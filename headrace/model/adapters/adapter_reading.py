"""Reads PEFT's files, its own and older ones: which tensor belongs to which part of a model.

Invariant: what is read computes what stock peft computes with the same files; what peft would pass over is refused by name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.model.adapters.adapter_config import AdapterConfig
from headrace.model.adapters.adapter_places import AdapterPlace, AdapterPlaces
from headrace.model.adapters.adapter_targets import DOWN, MAGNITUDE, UP, Product, Stack
from headrace.model.adapters.adapters import Adapters
from headrace.model.adapters.beside_files import PREFIX, WEIGHTS_NAME
from headrace.model.blocks.beside import StoredBeside
from headrace.model.blocks.binding import parameter_aliases
from headrace.model.chain.chain import Chain
from headrace.model.directory.matching import WeightMap
from headrace.model.stored.safetensors_file import StoredTensor, read_tensor_rows
from headrace.terms.errors import ConfigError, ModelError
from headrace.terms.layout import part

_ENDS = (DOWN, UP, MAGNITUDE)
# The name of an adapter stands before `.weight` where a model's own state was saved, as by trainers on FSDP and DeepSpeed.
_KEY = re.compile(r"(.+)\.(?:(lora_[AB])(?:\.([^.]+))?\.weight|(lora_magnitude_vector)(?:\.(?!weight$)([^.]+))?(?:\.weight)?)")


def read_adapters(directory: Path, chain: Chain, weights: WeightMap) -> StoredBeside:
    """Read the adapters in `directory` for the model of `chain`.

    Raises:
        ModelError: there are none, they are of another kind, or of another model; the message says which tensor.
    """
    config = AdapterConfig.read(directory)
    places = AdapterPlaces(chain, weights, config)
    try:
        with safe_open(directory / f"{WEIGHTS_NAME}.safetensors", framework="pt") as file:
            found = _Found(directory, type(chain.model).__name__, file)
            named: dict[str, str] = {}
            for key in file.keys():  # noqa: SIM118
                stem, end, name = _split(key)
                if end in _ENDS and len(named | {name: key}) > 1:
                    raise ModelError(
                        f"{directory}: {next(iter(named.values()))} and {key} are of two adapters, by the names in their keys; "
                        "save one of them"
                    )
                named |= {name: key} if end in _ENDS else {}
                if end in _ENDS and (place := places.of(stem)) is not None:
                    found.add(place, end, key)
                elif end in _ENDS and places.untargeted(stem):
                    raise ModelError(
                        f"{directory}: {key}: adapter_config.json does not choose {stem} (target_modules, exclude_modules, "
                        "layers_to_transform, target_parameters), and peft ignores it; correct one of them"
                    )
                elif end in _ENDS and chain.tied and stem == places.head:
                    raise ModelError(
                        f"{directory}: {key}: {stem} shares its matrix with the embedding; heads that are tied get no adapters "
                        "here: merge the adapter with peft"
                    )
                else:
                    _check_copy(directory, key, places.stored.get(stem), weights, file)
            if config.starts_at_random and (lacking := places.lacking(found.names)):
                raise ModelError(f"{directory}: {lacking} has no tensors, and init_lora_weights makes some at random")
            return found.read(chain, places, config)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{directory}: {WEIGHTS_NAME}.safetensors cannot be read: {error}") from error
    except ConfigError as error:
        raise ModelError(f"{directory}: {error}; give the model that it was trained on") from error


def _split(key: str) -> tuple[str, str, str]:
    """Return the name of a module in a file, which tensor of its adapter `key` is, and the adapter's name, if it has one."""
    stem = key.removeprefix(PREFIX)
    if (found := _KEY.fullmatch(stem)) is None:
        return stem.replace(".base_layer.", "."), "", ""
    module, matrix, of_matrix, magnitude, of_magnitude = found.groups()
    return module, magnitude or f"{matrix}.weight", of_matrix or of_magnitude or ""


class _Found:
    """Tensors of a file by what they belong to."""

    def __init__(self, directory: Path, model: str, file: Any) -> None:
        self._directory, self._model, self._file = directory, model, file
        self._keys: dict[tuple[int, str], dict[str, tuple[AdapterPlace, dict[str, str]]]] = {}

    @property
    def names(self) -> set[str]:
        """The names here of what has tensors."""
        return {name for _, name in self._keys}

    def add(self, place: AdapterPlace, end: str, key: str) -> None:
        """Note that the tensor `key` is one of the adapter of `place`."""
        of_product = self._keys.setdefault((place.unit, place.product.name), {})
        of_product.setdefault(place.name, (place, {}))[1][end] = key

    def read(self, chain: Chain, places: AdapterPlaces, config: AdapterConfig) -> StoredBeside:
        """Return the adapters with their tensors."""
        if not self._keys:
            raise ModelError(f"{self._directory}: it has no tensors for the blocks of {self._model}; give another model")
        products: dict[int, list[Product]] = {}
        parts: dict[str, list[_Part]] = {}
        for unit, product in places.adaptable.values():
            if (keys := self._keys.get((unit, product.name))) is not None:
                parts[product.name] = found = _parts_of(self._directory, product, keys.values(), config)
                ranked = replace(product, rank=sum(each.rank for each in found), scale=found[0].scale)
                products.setdefault(unit, []).append(ranked)
        adapters = Adapters.over(chain.layouts, config.settings, products)
        flats = {unit: torch.zeros(layout.num_elements, dtype=torch.float32) for unit, layout in adapters.layouts.items()}
        for unit, layout in adapters.layouts.items():
            views = {spec.name: part(flats[unit], spec).view(spec.shape) for spec in layout.parameters}
            for product in adapters.products[unit]:
                ends = product.shapes(config.settings)
                for each in parts[product.name]:
                    each.fill(product, {end: views[f"{product.name}.{end}"] for end in ends}, self._read)
        return StoredBeside(adapters, flats)

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
                raise ModelError(f"{next(iter(keys.values()))}: {lacking[0]} is missing beside it; the adapter is incomplete")
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
    directory: Path, product: Product, found: Sequence[tuple[AdapterPlace, dict[str, str]]] | Any, config: AdapterConfig
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
                f"{directory}: {name}: {len(of_expert)} of {product.experts} experts have adapters; the adapter is incomplete"
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
    first = parameter_aliases(weights.model).get(parameter or "", "")  # a tied head is stored as the embedding
    pieces = [piece for piece in weights.pieces.get(first, ()) if piece.index == ()]
    if not pieces:
        model = type(weights.model).__name__
        raise ModelError(
            f"{directory}: {key!r} belongs to nothing in the blocks of {model}. The adapter is of another model, or adapts "
            "more than linear modules of blocks and heads; give the model that it was trained on"
        )
    own, found = weights.checkpoint.tensors[pieces[0].key], file.get_slice(key)
    if own.shape != tuple(found.get_shape()) or not all(
        torch.equal(_floats_of(own, rows), found[start:stop].float()) for start, stop, rows in read_tensor_rows(own)
    ):
        raise ModelError(
            f"{directory}: {key}: this adapter has other weights for {parameter} than the model, and peft would replace the "
            "model's. Merge the adapter with peft, or give the model that it was trained on"
        )
