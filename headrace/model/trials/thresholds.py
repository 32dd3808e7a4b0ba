"""Tiny instances for what a model computes differently beyond some number of tokens: windows, chunks, temperatures, ranks.

Unknown keys of a configuration are taken for such numbers, and made so small that the trial's rows exceed them. If the instance
then does not run, the key is a size that other sizes must fit. Otherwise it is unknown how longer rows are computed, so
features that depend on it are limited to shorter rows. Invariant: no number of a configuration that is larger than the trial's
rows is ignored silently.
"""

import contextlib
import json
import math
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch

from headrace.model.blocks.building import model_from
from headrace.model.blocks.find_blocks import block_of, find_blocks
from headrace.model.blocks.kinds import keys_of
from headrace.model.trials.instance import LENGTHS, tiny_model, tiny_samples
from headrace.model.trials.tiny import (
    DROPPED,
    MET,
    UNREACHED,
    Layers,
    choose_layers,
    counted_in_tokens,
    open_keys,
    shrink_values,
)
from headrace.terms.errors import refusing

# An instance with more parameters than this would take longer to fill than refusing it.
_LARGEST_ELEMENTS = 30_000_000
# Layers of a tiny instance at most: where kinds of blocks follow from a layer's index, all up to the last kind are kept.
_MOST_LAYERS = 32
# A value for sizes that others have to divide, or that prevent an instance as large as the model is.
_DIVISIBLE = 16
# Some scalings of rotary tables change beyond the value of this key.
_ROPE_LENGTH = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class Tiny:
    """A tiny configuration: `key`, its JSON, identifies the architecture and structure.

    `met` are the keys that the trial's rows exceed; `unmet` are those that they do not exceed, but may have to. Both have the
    numbers of the full configuration. `chosen` are the tiny values of keys without a rule, `layers` those that it keeps.
    """

    key: str
    met: Mapping[str, float]
    unmet: Mapping[str, float]
    chosen: Mapping[str, float]
    scaled_rope: bool
    layers: Layers


def tiny_of(config: Any) -> Tiny:
    """Return the tiny configuration of the architecture and structure of `config`. Cached.

    Raises:
        ModelError: the architecture does not accept the shrunk sizes.
    """
    with _refusing(config):
        return _tiny(cast(Hashable, type(config)), _json(config))


def architecture_key(config: Any) -> str:
    """Return the shrunk configuration, which identifies architecture and structure."""
    return tiny_of(config).key


def key_without(config: Any, names: Collection[str]) -> str:
    """Return the key of the tiny instance whose rows do not exceed the keys `names` of `Tiny.met`.

    Raises:
        ModelError: the architecture does not accept these sizes.
    """
    tiny = tiny_of(config)
    chosen = {**tiny.chosen, **dict.fromkeys(names, UNREACHED)}
    full = _Full(type(config), json.loads(_json(config)), tiny.layers)
    with _refusing(config):
        return _json(full.shrunk(chosen, scaled_rope=tiny.scaled_rope))


def _refusing(config: Any) -> AbstractContextManager[None]:
    """Refuse what cannot be shrunk: configuration classes have rules of their own, and files any values."""
    return refusing(f"{type(config).__name__}: cannot make a tiny instance for checking")


@dataclass(frozen=True)
class _Full:
    """A full configuration's class and values, and the layers that its tiny instances keep."""

    config_class: type
    values: dict[str, Any]
    layers: Layers

    def shrunk(self, chosen: Mapping[str, float], *, scaled_rope: bool = True) -> Any:
        return shrink_values(self.config_class, self.values, chosen, scaled_rope=scaled_rope, layers=self.layers)


def _json(config: Any) -> str:
    return json.dumps(config.to_dict(), sort_keys=True, default=str)


@lru_cache(maxsize=256)
def _tiny(config_class: type, full: str) -> Tiny:
    values = json.loads(full)
    unknown = open_keys(values)
    whole = _Full(config_class, values, _layers(config_class, values))
    chosen, scaled_rope, runs = _base(whole, unknown)

    def lowered(key: str, chosen: dict[str, float]) -> dict[str, float]:
        tried = ({**chosen, key: float(size)} for size in MET)
        return next((one for one in tried if _runs(whole, one, scaled_rope=scaled_rope)), chosen)

    # Twice, because some keys have to fit others that are lowered later.
    for key in (*unknown, *unknown) if runs else ():
        if chosen.get(key, math.inf) > MET[0]:
            chosen = lowered(key, chosen)
    met = [key for key in chosen if chosen[key] <= MET[0]]
    unmet = {
        key: value
        for key, value in unknown.items()
        if runs and key not in met and not _is_a_size(whole, chosen, key, int(value))
    }
    if not scaled_rope and isinstance(length := (values.get("rope_parameters") or {}).get(_ROPE_LENGTH), int):
        unmet[_ROPE_LENGTH] = length
    numbers = {**{key: unknown[key] for key in met}, **counted_in_tokens(values)}
    tiny = _json(whole.shrunk(chosen, scaled_rope=scaled_rope))
    return Tiny(tiny, {name: numbers[name] for name in sorted(numbers)}, unmet, chosen, scaled_rope, whole.layers)


def _layers(config_class: type, values: dict[str, Any]) -> Layers:
    """Return the layers of which a tiny instance has a block of each kind in the model. If none has, return those that lists in
    the configuration ask for.
    """
    usual = choose_layers(values)
    try:
        wanted = _block_kinds(config_class(**{key: value for key, value in values.items() if key not in DROPPED}))
    except Exception:  # a later step says why the model cannot be built
        return usual
    firsts = [wanted.index(kind) for kind in dict.fromkeys(wanted)]
    for first in (0, 1):
        by_lists = choose_layers(values, first).kept
        several = sorted({*by_lists, *firsts})
        for kept in (by_lists, several, range(1 + max(several)) if max(several) < _MOST_LAYERS else by_lists):
            layers = Layers(tuple(kept), first)
            with contextlib.suppress(Exception):  # the configuration's own rules
                if {*_block_kinds(shrink_values(config_class, values, layers=layers))} >= {*wanted}:
                    return layers
    return usual


def _block_kinds(config: Any) -> list[Hashable]:
    """Return the kind of each block of a model: classes of its submodules, names and ranks of its parameters."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = model_from(config)
    blocks = find_blocks(model)
    keys, found = keys_of(model, blocks.name), dict[int, set[tuple[str, int]]]()
    for name, parameter in model.named_parameters():
        if (block := block_of(name, blocks.name)) is not None:
            found.setdefault(block, set()).add((keys[name][1], parameter.dim()))
    classes = [frozenset(type(module).__name__ for module in block.modules()) for block in blocks.modules]
    return [(own, frozenset(found.get(index, ()))) for index, own in enumerate(classes)]


def _base(whole: _Full, unknown: Mapping[str, float]) -> tuple[dict[str, float], bool, bool]:
    """Return values for all unknown keys or for none, whether rotary tables are scaled, and whether the instance then runs."""
    for scaled_rope in (True, False):
        for size in (*MET, _DIVISIBLE, None) if unknown else (None,):
            chosen = {} if size is None else dict.fromkeys(unknown, float(size))
            if _runs(whole, chosen, scaled_rope=scaled_rope):
                return chosen, scaled_rope, True
    return {}, True, False  # the attempt to build it will say why it cannot be built


def _runs(whole: _Full, chosen: Mapping[str, float], *, scaled_rope: bool) -> bool:
    try:
        config = whole.shrunk(chosen, scaled_rope=scaled_rope)
        if sum(shape.numel() for shape in _shapes(config)) > _LARGEST_ELEMENTS:
            return False
        model = tiny_model(whole.config_class, _json(config))
        with torch.no_grad():
            logits = model(input_ids=tiny_samples(model)[0].input_ids, use_cache=False).logits
    except Exception:  # the architecture's own code may not accept these sizes
        return False
    return logits.shape[1] == LENGTHS[0] and bool(torch.isfinite(logits).all())


def _shapes(config: Any) -> Iterator[torch.Size]:
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = model_from(config)
    yield from (parameter.shape for parameter in model.parameters())


def _is_a_size(whole: _Full, chosen: Mapping[str, float], key: str, value: int) -> bool:
    """Return whether shapes of parameters change with `key`, or only `value` fits: then it is no count of tokens."""
    own = _shapes_with(whole, chosen)
    others = [_shapes_with(whole, {**chosen, key: other}) for other in (*MET, UNREACHED, value // 2)]
    return all(shapes is None or shapes != own for shapes in others)


def _shapes_with(whole: _Full, chosen: Mapping[str, float]) -> list[torch.Size] | None:
    try:
        return list(_shapes(whole.shrunk(chosen)))
    except Exception:  # the architecture's own code does not accept these sizes
        return None
