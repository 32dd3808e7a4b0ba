"""Which tiny instance shows what a model computes differently beyond some number of tokens: windows, chunks, temperatures,
ranks.

Unknown keys of a configuration are taken for such numbers, and made so small that the trial's rows exceed them. Where the
instance then does not run, the key is a size that others have to fit; otherwise it is not known how longer rows are computed,
and what depends on that is limited to shorter ones. Invariant: no number of a configuration that is larger than the trial's
rows is ignored silently.
"""

import json
import math
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM

from headrace.model.instance import LENGTHS, tiny_model, tiny_samples
from headrace.model.tiny import MET, UNREACHED, counted_in_tokens, open_keys, shrink_values

# An instance with more parameters than this would take longer to fill than refusing it.
_LARGEST_ELEMENTS = 30_000_000
# A value for sizes that others have to divide, or that prevent an instance as large as the model is.
_DIVISIBLE = 16
# Some scalings of rotary tables change beyond the value of this key.
_ROPE_LENGTH = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class Tiny:
    """A tiny configuration: `key`, its JSON, identifies the architecture and structure.

    `met` are the keys that the trial's rows exceed, `unmet` those that they might have to exceed and do not, both with the
    numbers of the full configuration. `chosen` are the tiny values of keys without a rule.
    """

    key: str
    met: Mapping[str, float]
    unmet: Mapping[str, float]
    chosen: Mapping[str, float]
    scaled_rope: bool


def tiny_of(config: Any) -> Tiny:
    """Return the tiny configuration of the architecture and structure of `config`. Cached.

    Raises:
        ModelError: the architecture does not accept the shrunk sizes.
    """
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
    return _json(shrink_values(type(config), json.loads(_json(config)), chosen, scaled_rope=tiny.scaled_rope))


def _json(config: Any) -> str:
    return json.dumps(config.to_dict(), sort_keys=True, default=str)


@lru_cache(maxsize=256)
def _tiny(config_class: type, full: str) -> Tiny:
    values = json.loads(full)
    unknown = open_keys(values)
    chosen, scaled_rope, runs = _base(config_class, values, unknown)

    def lowered(key: str, chosen: dict[str, float]) -> dict[str, float]:
        tried = ({**chosen, key: float(size)} for size in MET)
        return next((one for one in tried if _runs(config_class, values, one, scaled_rope=scaled_rope)), chosen)

    # Twice, because some keys have to fit others that are lowered later.
    for key in (*unknown, *unknown) if runs else ():
        if chosen.get(key, math.inf) > MET[0]:
            chosen = lowered(key, chosen)
    met = [key for key in chosen if chosen[key] <= MET[0]]
    unmet = {
        key: value
        for key, value in unknown.items()
        if runs and key not in met and not _is_a_size(config_class, values, chosen, key, int(value))
    }
    if not scaled_rope and isinstance(length := (values.get("rope_parameters") or {}).get(_ROPE_LENGTH), int):
        unmet[_ROPE_LENGTH] = length
    numbers = {**{key: unknown[key] for key in met}, **counted_in_tokens(values)}
    tiny = _json(shrink_values(config_class, values, chosen, scaled_rope=scaled_rope))
    return Tiny(tiny, {name: numbers[name] for name in sorted(numbers)}, unmet, chosen, scaled_rope)


def _base(config_class: type, values: dict[str, Any], unknown: Mapping[str, float]) -> tuple[dict[str, float], bool, bool]:
    """Return values for all unknown keys or for none, whether rotary tables are scaled, and whether the instance then runs."""
    for scaled_rope in (True, False):
        for size in (*MET, _DIVISIBLE, None) if unknown else (None,):
            chosen = {} if size is None else dict.fromkeys(unknown, float(size))
            if _runs(config_class, values, chosen, scaled_rope=scaled_rope):
                return chosen, scaled_rope, True
    return {}, True, False  # the attempt to build it will say why it cannot be built


def _runs(config_class: type, values: dict[str, Any], chosen: Mapping[str, float], *, scaled_rope: bool) -> bool:
    try:
        config = shrink_values(config_class, values, chosen, scaled_rope=scaled_rope)
        if sum(shape.numel() for shape in _shapes(config)) > _LARGEST_ELEMENTS:
            return False
        model = tiny_model(config_class, _json(config))
        with torch.no_grad():
            logits = model(input_ids=tiny_samples(model)[0].input_ids, use_cache=False).logits
    except Exception:  # the architecture's own code may not accept these sizes
        return False
    return logits.shape[1] == LENGTHS[0] and bool(torch.isfinite(logits).all())


def _shapes(config: Any) -> Iterator[torch.Size]:
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    yield from (parameter.shape for parameter in model.parameters())


def _is_a_size(config_class: type, values: dict[str, Any], chosen: Mapping[str, float], key: str, value: int) -> bool:
    """Return whether shapes of parameters change with `key`, or only `value` fits: then it is no count of tokens."""
    own = _shapes_with(config_class, values, chosen)
    others = [_shapes_with(config_class, values, {**chosen, key: other}) for other in (*MET, UNREACHED, value // 2)]
    return all(shapes is None or shapes != own for shapes in others)


def _shapes_with(config_class: type, values: dict[str, Any], chosen: Mapping[str, float]) -> list[torch.Size] | None:
    try:
        return list(_shapes(shrink_values(config_class, values, chosen)))
    except Exception:  # the architecture's own code does not accept these sizes
        return None
