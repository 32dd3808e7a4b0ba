"""Adapters in peft's files: `adapter_config.json` and `adapter_model.safetensors`, written and read.

Invariant: stock peft loads what is written here, and gives the logits that the blocks gave.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.model.adapters import DOWN, Adapters, Stack, is_linear, is_target, stacks_of
from headrace.model.chain import Chain
from headrace.model.export import appearing_model, copy_files
from headrace.model.matching import WeightMap
from headrace.model.safetensors_file import StoredTensor
from headrace.model.shard_writer import ShardWriter, shard_file_bytes
from headrace.model.text_part import names_in_whole
from headrace.terms.adapter import Dora, Lora
from headrace.terms.errors import ConfigError, ModelError
from headrace.terms.layout import part
from headrace.terms.provenance import COMPRESSION_NOTE_NAME

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model"
_PREFIX = "base_model.model."
# Files that lie beside weights and say that a directory is a whole model.
_NOT_COPIED = ("config.json", "generation_config.json", COMPRESSION_NOTE_NAME, CONFIG_NAME, "trainer_state.json")
# Settings of peft that would change what is computed, each with the values with which it does not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "trainable_token_indices": (None, []),
    "use_rslora": (None, False),
    "lora_bias": (None, False),
    "layer_replication": (None, []),
    "exclude_modules": (None, []),
}


def adapter_file_bytes(adapters: Adapters) -> int:
    """Return the bytes of the file that `write_adapters` makes, which is larger by longer names in a larger model."""
    return shard_file_bytes([_stored(name, shape) for name, shape in _shapes(adapters).items()])


def write_adapters(
    out: Path, adapters: Adapters, chain: Chain, weights: WeightMap, read: Callable[[int], Tensor], notes: Mapping[str, str]
) -> None:
    """Write a directory of adapters, which appears whole or not at all; `read` gives a unit's tensors, flat, in the layout
    that `adapters` has. `notes` are texts by the names of the files that get them.

    Raises:
        RunDirectoryError, ExportFailed: as `appearing_model`.
    """
    names = _names_in_files(chain, weights)
    stacks = [each.name for found in adapters.products.values() for each in found if isinstance(each, Stack)]
    keys = _keys(chain, names, stacks)
    shapes = {keys[name]: shape for name, shape in _shapes(adapters).items()}
    with appearing_model(out, adapter_file_bytes(adapters)) as partial:
        writer = ShardWriter(partial, [[_stored(key, shape) for key, shape in shapes.items()]], WEIGHTS_NAME)
        try:
            for unit, layout in adapters.layouts.items():
                flat = read(unit)
                for spec in layout.parameters:
                    writer.write(keys[spec.name], [part(flat, spec).numpy()])
            writer.finish()
        finally:
            writer.close()
        copy_files(weights.checkpoint.directory, partial, without=_NOT_COPIED)
        config = _config(adapters, chain, weights, names)
        (partial / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name, text in notes.items():
            (partial / name).write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class StoredAdapters:
    """Adapters that were read: what they are, and their tensors (float32) by unit, flat as `adapters.layouts` says."""

    adapters: Adapters
    flats: Mapping[int, Tensor]

    def bind(self, device: torch.device) -> None:
        """Bind all of them, on `device`."""
        for unit, layout in self.adapters.layouts.items():
            self.adapters.bind(unit, layout, self.flats[unit].to(device), None)


def is_adapter_directory(directory: Path) -> bool:
    """Return whether a directory has adapters as peft writes them."""
    return (directory / CONFIG_NAME).is_file()


def named_base(directory: Path) -> Path:
    """Return the model directory of which adapters say that they were trained on it.

    Raises:
        ModelError: as `read_adapters`; or that directory is not there.
    """
    name = _read_config(directory).get("base_model_name_or_path")
    if isinstance(name, str) and name and (Path(name) / "config.json").is_file():
        return Path(name)
    raise ModelError(
        f"{directory}: an adapter of {name!r}, which is no model directory here; give the model, and --adapter {directory}"
    )


def read_adapters(directory: Path, chain: Chain, weights: WeightMap) -> StoredAdapters:
    """Read the adapters in `directory` for the model of `chain`.

    Raises:
        ModelError: there are none, they are of another kind, or of another model; the message says which tensor.
    """
    config = _read_config(directory)
    settings, known = _settings(directory, config), _names_in_files(chain, weights)
    asked = config.get("target_parameters") or ()
    stacks = [name for name in _stacks(chain) if asked and is_target(known.get(name, name), tuple(asked))]
    names = {key: own for own, key in _keys(chain, known, stacks).items()}
    try:
        with safe_open(directory / f"{WEIGHTS_NAME}.safetensors", framework="pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            adapters = _of_shapes(directory, chain, settings, names, shapes)
            flats = {unit: torch.zeros(layout.num_elements) for unit, layout in adapters.layouts.items()}
            keys = {own: key for key, own in names.items()}
            for unit, layout in adapters.layouts.items():
                for spec in layout.parameters:
                    part(flats[unit], spec).view(spec.shape).copy_(file.get_tensor(keys[spec.name]))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{directory}: {WEIGHTS_NAME}.safetensors cannot be read: {error}") from error
    return StoredAdapters(adapters, flats)


def _of_shapes(
    directory: Path, chain: Chain, settings: Lora, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> Adapters:
    unknown = [key for key in shapes if key not in names]
    if unknown or not shapes:
        what = f"{unknown[0]!r} belongs to nothing in" if unknown else "it has no tensors for"
        raise ModelError(
            f"{directory}: {what} the blocks of {type(chain.model).__name__}: the adapter is of another model, or adapts "
            "more than linear modules of blocks and heads; give the model that it was trained on"
        )
    modules = {names[key].removesuffix(f".{DOWN}") for key in shapes if key.endswith(DOWN)}
    given = type(settings)(rank=settings.rank, alpha=settings.alpha, target_modules="+".join(sorted(modules)))
    try:
        adapters = Adapters.of(chain.model, chain.layouts, chain.num_blocks, given)
    except ConfigError as error:
        raise ModelError(f"{directory}: {error}; give the model that it was trained on") from error
    wanted = _shapes(adapters)
    for key, shape in shapes.items():
        if wanted.get(names[key]) != shape:
            asked = wanted.get(names[key])
            raise ModelError(
                f"{directory}: {key}: found shape {shape}, {type(chain.model).__name__} with this adapter_config.json has "
                f"{asked or 'none'}; give the model that it was trained on"
            )
    if lacking := sorted(set(wanted) - {names[key] for key in shapes}):
        raise ModelError(f"{directory}: {lacking[0]} is missing; the adapter is not whole")
    return adapters


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{directory}: no adapter: {CONFIG_NAME} cannot be read ({error}); give a directory of peft"
        ) from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: expected an object, found {type(found).__name__}")
    return found


def _settings(directory: Path, config: Mapping[str, Any]) -> Lora:
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{directory}: peft_type {config.get('peft_type')!r}; adapters of type LORA are read (lora and dora)")
    for key, plain in _PLAIN.items():
        if config.get(key) not in (*plain, None):
            raise ModelError(f"{directory}: {CONFIG_NAME}: {key} {config[key]!r} is not supported; merge it with peft")
    kind = Dora if config.get("use_dora") else Lora
    try:
        return kind(rank=config["r"], alpha=config["lora_alpha"])
    except (KeyError, ConfigError) as error:
        raise ModelError(f"{directory}: {CONFIG_NAME}: {error}") from error


def _config(adapters: Adapters, chain: Chain, weights: WeightMap, names: Mapping[str, str]) -> dict[str, Any]:
    settings, stored = adapters.settings, weights.stored_model
    every = [each for found in adapters.products.values() for each in found]
    modules = {names[each.name] for each in every if not isinstance(each, Stack)}
    experts = sorted({names[each.name] for each in every if isinstance(each, Stack)})
    ends = sorted({name.rpartition(".")[2] for name in modules})
    # Named by the ends of names where these match the same modules everywhere in the model.
    alike = {name for name, module in stored.named_modules() if is_linear(module) and is_target(name, ends)} == modules
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(weights.checkpoint.directory),
        "r": settings.rank,
        "lora_alpha": settings.scale * settings.rank,
        "lora_dropout": settings.dropout,
        "target_modules": ends if alike else sorted(modules),
        "target_parameters": experts or None,
        "use_dora": settings.has_magnitudes,
        "bias": "none",
        "fan_in_fan_out": any(each.transposed for each in every if not isinstance(each, Stack)),
        "init_lora_weights": True,
        "inference_mode": True,
    }


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


_ENDS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")


def _keys(chain: Chain, names: Mapping[str, str], stacks: Sequence[str]) -> dict[str, str]:
    """Return how the file calls the tensors that adapters may have, by their names here; of packed experts those of `stacks`.

    peft wraps a module once for each parameter that is adapted, in their order: the last one is outermost.
    """
    modules = [name for name, module in chain.model.named_modules() if is_linear(module)]
    places = {name: names.get(name, name) for name in modules}
    for number, name in enumerate(stacks):
        owner = name.rpartition(".")[0]
        within = sum(other.rpartition(".")[0] == owner for other in stacks[number + 1 :])
        places[name] = names.get(name, name).rpartition(".")[0] + ".base_layer" * within
    return {f"{name}.{end}": f"{_PREFIX}{place}.{end}" for name, place in places.items() for end in _ENDS}


def _shapes(adapters: Adapters) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.shape for layout in adapters.layouts.values() for spec in layout.parameters}


def _stored(key: str, shape: tuple[int, ...]) -> StoredTensor:
    return StoredTensor(key, Path(), 0, 4 * int(np.prod(shape)), "F32", shape)
