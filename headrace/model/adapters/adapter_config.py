"""`adapter_config.json` as stock peft understands it: each of its keys is known.

Invariant: a key that changes the result is computed, or its value is refused by name; so is an unknown key.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.files.model_directory import ADAPTER_CONFIG
from headrace.model.adapters.adapter_targets import is_target
from headrace.terms.errors import ConfigError, ModelError
from headrace.terms.json_text import parse_json
from headrace.terms.options.adapter import ALL_LINEAR, Dora, Lora
from headrace.terms.options.named import plain_number

CONFIG_NAME = ADAPTER_CONFIG
# Keys whose values decide what is computed.
COMPUTED = frozenset(
    (
        *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "init_lora_weights"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters"),
    )
)
# Keys that change no result once an adapter is trained, whatever their values, and why.
IRRELEVANT: Mapping[str, str] = {
    "auto_mapping": "names the class of the model, which is given",
    **dict.fromkeys(("base_model_name_or_path", "revision"), "names the model, which is given"),
    "peft_version": "says who wrote the file",
    "task_type": "names of tensors say which model they belong to",
    "inference_mode": "says what is trained",
    "lora_dropout": "acts in training",
    "fan_in_fan_out": "follows from the module, in peft too",
    **dict.fromkeys(
        ("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        "acts before training; init_lora_weights says whether",
    ),
    "megatron_core": "acts with megatron_config",
    "qalora_group_size": "acts with use_qalora",
    "runtime_config": "says where peft computes; peft ignores it in files",
}
# Keys that change what is computed unless they are null, false, empty, or one of these values.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    **dict.fromkeys(("modules_to_save", "megatron_config", "trainable_token_indices", "velora_config"), ()),
    **dict.fromkeys(("alora_invocation_tokens", "use_qalora", "monteclora_config", "layer_replication"), ()),
    **dict.fromkeys(("lora_bias", "use_bdlora", "arrow_config", "kasa_config", "ensure_weight_tying"), ()),
}
# First numbers after which peft leaves the model's weights as they are; the others change these when an adapter is loaded.
KEEPS_WEIGHTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica", "lora_ga")
# Of these, those after which an adapter without stored tensors changes the result by random numbers.
_RANDOM = (None, False, "orthogonal")


@dataclass(frozen=True)
class AdapterConfig:
    """The settings of an adapter in peft's files. `modules`, `excluded`, `parameters`: which have one, as peft writes it."""

    settings: Lora
    alpha: float
    by_root: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    modules: str | Sequence[str] | None
    excluded: str | Sequence[str]
    parameters: Sequence[str]
    layers: Sequence[int]
    layer_lists: Sequence[str]
    starts_at_random: bool

    @classmethod
    def read(cls, directory: Path) -> "AdapterConfig":
        """Read what `directory` has.

        Raises:
            ModelError: it has none, a key or a value is not known here, or is not computed; the message names it.
        """
        found = read_adapter_json(directory)
        _check_keys(directory, found)
        try:
            return cls.of(found)
        except (ConfigError, KeyError, TypeError, ValueError, re.error) as error:
            said = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ModelError(f"{directory}: {CONFIG_NAME}: {said}") from error

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "AdapterConfig":
        """Return what the values of the keys mean.

        Raises:
            ConfigError, KeyError, ValueError, re.error: a value is missing, or impossible.
        """
        layers = found.get("layers_to_transform")
        modules, excluded = (_names(found, key, regex=True) for key in ("target_modules", "exclude_modules"))
        if isinstance(modules, str) and (
            found.get("layers_to_transform") is not None or found.get("layers_pattern") is not None
        ):
            raise ValueError("layers_to_transform and layers_pattern need a list of target_modules, found an expression")
        kind = Dora if _switch(found, "use_dora") else Lora
        alpha = _number("lora_alpha", found["lora_alpha"])
        return cls(
            settings=kind(rank=_rank("r", found["r"]), alpha=alpha),
            alpha=alpha,
            by_root=_switch(found, "use_rslora"),
            ranks={key: _rank("rank_pattern", value) for key, value in _patterns(found, "rank_pattern").items()},
            alphas={key: _number("alpha_pattern", value) for key, value in _patterns(found, "alpha_pattern").items()},
            modules=None if found.get("target_modules") is None else modules,
            excluded=excluded,
            parameters=_names(found, "target_parameters", regex=False),
            layers=[layers] if isinstance(layers, int) else [int(each) for each in layers or ()],
            layer_lists=_one_or_more(_names(found, "layers_pattern", regex=True)),
            starts_at_random=found.get("init_lora_weights", True) in _RANDOM,
        )

    def words(self) -> dict[str, str]:
        """Return the settings with which Headrace trains on, by their names in the option `adapter`.

        Raises:
            ConfigError: there are no such settings; the message names the key.
        """
        lists = {"target_modules": self.modules, "exclude_modules": self.excluded}
        by_pattern = next((key for key, value in lists.items() if isinstance(value, str) and value.lower() != ALL_LINEAR), None)
        many = {"rank_pattern": self.ranks, "alpha_pattern": self.alphas, "layers_to_transform": self.layers}
        if wrong := by_pattern or next((key for key, value in many.items() if value), None):
            raise ConfigError(
                f"{wrong} of {CONFIG_NAME} has no counterpart in training; merge the adapter, and train the result"
            )
        if self.modules is None and not self.parameters:
            raise ConfigError(f"{CONFIG_NAME} names no target_modules; add them there")
        rank = self.settings.rank
        parameters = [name.removesuffix(".weight") for name in self.parameters]
        targets = [ALL_LINEAR, *parameters] if isinstance(self.modules, str) else [*(self.modules or ()), *parameters]
        found = {"rank": rank, "alpha": self.scale("", rank) * rank, "target_modules": "+".join(targets)}
        if self.excluded:
            found["exclude_modules"] = "+".join(self.excluded)
        return {key: plain_number(str(value)) for key, value in found.items()}

    def rank(self, name: str) -> int:
        """Return the rank of the adapter of what is called `name` in the stored model."""
        return next((rank for pattern, rank in self.ranks.items() if _matches(pattern, name)), self.settings.rank)

    def scale(self, name: str, rank: int) -> float:
        """Return what the product of its B and A is multiplied by."""
        alpha = next((alpha for pattern, alpha in self.alphas.items() if _matches(pattern, name)), self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)

    def targets(self, name: str, head: str | None) -> bool:
        """Return whether the module `name` gets an adapter; `head` is the name of the model's head.

        Where peft would choose modules by the architecture (null), those that have tensors are taken.
        """
        if self.excluded and (
            re.fullmatch(self.excluded, name) is not None if isinstance(self.excluded, str) else is_target(name, self.excluded)
        ):
            return False
        if self.modules is None:
            return not self.parameters
        if isinstance(self.modules, str):
            return name != head if self.modules.lower() == ALL_LINEAR else re.fullmatch(self.modules, name) is not None
        if name in self.modules:
            return True
        return bool(self.modules) and is_target(name, self.modules) and self._in_layers(name)

    def targets_parameter(self, name: str) -> bool:
        """Return whether the parameter `name` gets an adapter of its own."""
        return bool(self.parameters) and is_target(name, self.parameters)

    def _in_layers(self, name: str) -> bool:
        """Return whether a module that is named by its end is in one of the layers that are asked for."""
        if not self.layers:
            return True
        lists = [rf"(?:.*?\.)?{pattern}" for pattern in self.layer_lists] or [r".*?\.[^.]*"]
        found = next((match for each in lists if (match := re.match(rf"{each}\.(?P<layer>\d+)\.", name)) is not None), None)
        return found is not None and int(found["layer"]) in self.layers


def read_adapter_json(directory: Path) -> dict[str, Any]:
    """Return what `adapter_config.json` in `directory` holds.

    Raises:
        ModelError: it cannot be read, or holds no object.
    """
    path = directory / CONFIG_NAME
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{directory}: no adapter: {CONFIG_NAME} cannot be read ({error}); give a directory of peft"
        ) from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: expected an object, found {type(found).__name__}")
    return found


def _check_keys(directory: Path, found: Mapping[str, Any]) -> None:
    if found.get("peft_type") != "LORA":
        raise ModelError(f"{directory}: peft_type {found.get('peft_type')!r}; adapters of type LORA are read (lora and dora)")
    for key, value in found.items():
        if key in COMPUTED or key in IRRELEVANT or value is None or value is False or value in ("", [], {}):
            continue
        if key not in REFUSED:
            raise ModelError(
                f"{directory}: {CONFIG_NAME}: {key} {_shown(value)} is unknown, and may change results; merge the adapter "
                "with the peft that wrote it"
            )
        if value not in REFUSED[key]:
            raise ModelError(f"{directory}: {CONFIG_NAME}: {key} {_shown(value)} is not supported; merge it with peft")
    first = found.get("init_lora_weights", True)
    if not any(first is each or (isinstance(each, str) and first == each) for each in KEEPS_WEIGHTS):
        raise ModelError(
            f"{directory}: {CONFIG_NAME}: init_lora_weights {_shown(first)}: peft changes the model's weights, too, when it "
            "loads the adapter; merge it with peft, or save it with path_initial_model_for_weight_conversion"
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _switch(found: Mapping[str, Any], key: str) -> bool:
    value = found.get(key)
    if value not in (None, False, True):
        raise ValueError(f"{key}: expected true or false, found {value!r}")
    return bool(value)


def _rank(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}: expected a whole number of at least 1, found {value!r}")
    return value


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key}: expected a number, found {value!r}")
    return value


def _patterns(found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = found.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{key}: expected an object, found {value!r}")
    for pattern in value:
        re.compile(pattern)
    return value


def _names(found: Mapping[str, Any], key: str, *, regex: bool) -> Any:
    """Return the names under `key`; with `regex`, what is no list is an expression."""
    value = found.get(key) or ()
    if isinstance(value, str) and regex:
        if value.lower() != ALL_LINEAR:
            re.compile(value)
        return value
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{key}: expected a list of names, found {value!r}")
    return tuple(value)


def _one_or_more(value: Any) -> Sequence[str]:
    return (value,) if isinstance(value, str) else value


def _matches(pattern: str, name: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", name) is not None
