"""Shrink a configuration to a tiny instance of the same architecture.

The chain must know some things about an architecture: what its blocks return, which parameters come before and after them,
whether packed samples stay apart. It finds them by trying, on an instance of a few kilobytes. Invariant: shrinking changes
sizes, never
structure: switches, layer patterns, tying, scalings and the kind of head sharing stay as they are. Counts of tokens shrink,
too, below the length of a tiny row. So the trial sees a window, or a position from which something is computed differently.
"""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from headrace.terms.errors import ModelError

_HEAD_DIM = 16
_NUM_HEADS = 4
_HIDDEN = _HEAD_DIM * _NUM_HEADS
_VOCABULARY = 97
_MAX_LAYERS = 4
# How configurations call the number of experts of a block.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

# Canonical keys of transformers 5 configurations and the size that each gets. A value that is smaller already is kept.
_SIZES = {
    r"(num_hidden_layers|n_layers?|num_layers)": None,  # chosen from the layer pattern
    r"(\w+_)?vocab_size(_per_layer_input)?": _VOCABULARY,
    r"(hidden_size|n_embd|d_model)": _HIDDEN,
    r"(head_dim|global_head_dim|d_kv|v_head_dim|rotary_dim)": _HEAD_DIM,
    r"qk_nope_head_dim": _HEAD_DIM,
    r"qk_rope_head_dim": _HEAD_DIM // 2,
    r"(kv_lora_rank|q_lora_rank)": 16,
    r"(num_attention_heads|n_heads?)": _NUM_HEADS,
    r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length)": 128,
    r"(sliding_window|attention_chunk_size|window_size)": 8,
    "|".join(EXPERT_COUNTS): 4,
    r"(num_experts_per_tok(en)?|moe_topk|moe_k)": 2,
    r"(n_group|num_expert_group)": 2,
    r"topk_group": 1,
    r"first_k_dense_replace": 1,
    r"max_window_layers": 1,
    r"linear_(key|value)_head_dim": _HEAD_DIM,
    r"linear_num_key_heads": 2,
    r"linear_num_value_heads": 4,
    r"(mamba_d_head|mamba_head_dim)": _HEAD_DIM,
    r"(mamba_d_state|ssm_state_size|state_size)": 16,
    r"(mamba_n_groups|n_groups)": 2,
    r"(mamba_chunk_size|chunk_size)": 8,
    r"time_step_rank": 4,
    r"hidden_size_per_layer_input": 8,
    r"\w*(intermediate_size|ffn_hidden_size|ffn_dim|n_inner)": 96,
}
# Those of them that count tokens: a shorter row would never reach them.
_COUNTED_IN_TOKENS = re.compile(r"(sliding_window|attention_chunk_size|window_size)")
# The longer sample of the trial exceeds both. The larger lies between the samples' lengths, so a decision by the longest sample
# of a batch is seen. The smaller is for values that are cut into even parts.
MET = (11, 8)
# More than any row of the trial has, and a multiple of what sizes are usually multiples of.
UNREACHED = 24
# Keys that are neither sizes nor counts of tokens: the base of rotary tables, the end of a range of initial values.
_NEITHER = re.compile(r"\w*rope_theta|rope_type|factor|beta_fast|seed|\w*_token_(id|index)|\w*initializer\w*|linear_a_log_max")
# Keys with the number and width of a state-space layer's heads, and the expansion of the model's width that they divide.
_STATE_SPACE_HEADS = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ("mamba_num_heads", "mamba_head_dim", "expand"),
    ("num_heads", "head_dim", "expand"),
)
_KEY_VALUE_HEADS = re.compile(r"(num_key_value_heads|kv_n_heads|num_kv_heads|num_global_key_value_heads|n_head_kv)")
# The length beyond which rotary tables of the type `dynamic` grow with the row.
_TABLE_LENGTH = "max_position_embeddings"
# The number of last layers that attend to keys and values of earlier ones.
_SHARING = "num_kv_shared_layers"
_SPECIAL_TOKEN = re.compile(r"(pad|bos|eos|sep|decoder_start|image|audio|video)_token_(id|index)")
_LAYERS_BY_INDEX = re.compile(r"\w*(layers|layer_ids|layer_idxs?|attn_idxs|indices)")
_RANDOM = re.compile(r"(\w*_)?(dropout|pdrop|jitter_noise)(_prob|_rate)?")
DROPPED = ("qk_head_dim", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "architectures")


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers that a tiny instance keeps: indices from 0, ascending. `first` is what lists of layers call the first one."""

    kept: tuple[int, ...]
    first: int = 0


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What decides the tiny value of a key. `layers` are kept, `heads` is the full model's number of attention heads, and
    `chosen` has values of keys without a rule here.
    """

    layers: "Layers"
    heads: int | None
    chosen: Mapping[str, float]

    def of(self, key: str, value: Any) -> Any:
        """Return the tiny value in the place of `value`."""
        if key in ("rope_parameters", "rope_scaling"):
            return value  # `_shrink_rope` does it, which knows the width of a tiny head
        if isinstance(value, dict):
            return {name: self.inside(value).of(str(name), inner) for name, inner in value.items()}
        if isinstance(value, list):
            return self._of_list(key, value)
        if _RANDOM.fullmatch(key) and isinstance(value, float):
            return 0.0
        if _SPECIAL_TOKEN.fullmatch(key):
            return None if value is None else 0 if key == "pad_token_id" else 1
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        known = self._known(key, value) if isinstance(value, int) else None
        if known is None:
            return type(value)(self.chosen[key]) if key in self.chosen and value > MET[0] else value
        return known

    def inside(self, values: Mapping[str, Any]) -> "_Sizes":
        """Return the same for a part of a configuration that may have attention heads of its own."""
        return replace(self, heads=_num_heads(values) or self.heads)

    def _of_list(self, key: str, value: list[Any]) -> list[Any]:
        if _LAYERS_BY_INDEX.fullmatch(key) and _ascends(value):
            first = self.layers.first
            return [place + first for place, index in enumerate(self.layers.kept) if index + first in value]
        return [self.of(key, inner) for inner in value]

    def _known(self, key: str, value: int) -> int | None:
        if _KEY_VALUE_HEADS.fullmatch(key):
            return _NUM_HEADS if value == self.heads else 1 if value == 1 else _NUM_HEADS // 2
        for pattern, size in _SIZES.items():
            if re.fullmatch(pattern, key):
                if _COUNTED_IN_TOKENS.fullmatch(key) and key in self.chosen:
                    return int(self.chosen[key])
                return len(self.layers.kept) if size is None else _smaller(key, value, size)
        return None


def shrink_values(
    config_class: type,
    values: dict[str, Any],
    chosen: Mapping[str, float] = MappingProxyType({}),
    *,
    scaled_rope: bool = True,
    layers: Layers | None = None,
) -> Any:
    """Return a tiny configuration without dropout, from a configuration's class and values, with some of its `layers`: those of
    `choose_layers` if None are given.

    `chosen` are values for keys of `open_keys`, and for those counted in tokens; without `scaled_rope` rotary tables are plain.

    Raises:
        Exception: of any kind: the configuration's own rules do not accept the shrunk values.
    """
    small = {key: value for key, value in values.items() if key not in DROPPED}
    layers = layers or choose_layers(values)
    sizes = _Sizes(layers, _num_heads(values), chosen)
    for key, value in values.items():
        if key in small:
            small[key] = sizes.of(key, [value[index] for index in layers.kept] if _is_per_layer(values, key) else value)
    own = _own_settings(values)
    if own:
        small["per_layer_config"] = {
            place: {key: _shrink_own(key, value, values, sizes.inside(own[index])) for key, value in own[index].items()}
            for place, index in enumerate(layers.kept)
            if index in own
        }
    if values.get(_SHARING):
        small[_SHARING] = sum(index >= _layer_count(values) - values[_SHARING] for index in layers.kept)
    for count, width, expand in _STATE_SPACE_HEADS:
        if all(isinstance(values.get(key), int) for key in (count, width, expand)):
            small[count] = values[expand] * _HIDDEN // _HEAD_DIM  # number times width of heads is the expanded width
    if "qk_rope_head_dim" in values and "qk_nope_head_dim" in values:
        small.pop("head_dim", None)  # the architecture derives it
        if any(_is_whole_head({**values, **settings}) for settings in own.values()):
            small["head_dim"] = _HEAD_DIM + _HEAD_DIM // 2
        if values.get("head_dim") == values["qk_rope_head_dim"]:
            small["head_dim"] = _HEAD_DIM // 2  # rotary tables are made for it, and not all architectures derive it
    if isinstance(values.get("mamba_d_ssm"), int):
        small |= {"mamba_d_ssm": _HIDDEN, "mamba_n_heads": _NUM_HEADS, "mamba_d_head": _HEAD_DIM}
    if values.get("word_embed_proj_dim") not in (None, values.get("hidden_size")):
        small["word_embed_proj_dim"] = _HIDDEN // 2  # an embedding narrower than the model is structure, not size
    elif "word_embed_proj_dim" in values:
        small["word_embed_proj_dim"] = small["hidden_size"]
    rotated = _HEAD_DIM // 2 if "qk_rope_head_dim" in values else _HEAD_DIM
    for key in ("rope_parameters", "rope_scaling"):
        if key in small:
            small[key] = _shrink_rope(small[key], sizes, rotated, scaled=scaled_rope)
    if scaled_rope and _table_grows(values):
        small[_TABLE_LENGTH] = int(chosen.get(_TABLE_LENGTH, min(values[_TABLE_LENGTH], MET[0])))
    return config_class(**small)


def _is_whole_head(values: Mapping[str, Any]) -> bool:
    """Return whether the width of a layer's heads is that of their parts with and without rotation."""
    return bool(values.get("head_dim") == values["qk_nope_head_dim"] + values["qk_rope_head_dim"])


def _num_heads(values: Mapping[str, Any]) -> int | None:
    return next((values[key] for key in ("num_attention_heads", "n_head", "n_heads") if values.get(key)), None)


def open_keys(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the keys, at any depth, that have no rule and a value above the larger of `MET`, with the least such value of
    each.

    Nobody knows whether they are sizes, or counts of tokens from which something is computed differently, so it is tried.
    """
    found: dict[str, float] = {}

    def look(key: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                look(str(name), inner)
        elif isinstance(value, list):
            for inner in value if not (_LAYERS_BY_INDEX.fullmatch(key) and _ascends(value)) else ():
                look(key, inner)
        elif isinstance(value, int | float) and not isinstance(value, bool) and MET[0] < value < math.inf and _is_open(key):
            found[key] = min(value, found.get(key, math.inf))

    for key, value in values.items():
        if key not in DROPPED and key not in ("id2label", "label2id", "per_layer_config"):
            look(key, value)
    return found


def counted_in_tokens(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the keys that are known to count tokens, and shrink, with their values."""
    return {
        key: value
        for key, value in values.items()
        if (_COUNTED_IN_TOKENS.fullmatch(key) or (key == _TABLE_LENGTH and _table_grows(values)))
        and isinstance(value, int)
        and value > MET[1]
    }


def _table_grows(values: Mapping[str, Any]) -> bool:
    """Return whether rotary tables are made anew for rows longer than `_TABLE_LENGTH`."""
    ropes = [values.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    kinds = [
        part.get("rope_type", part.get("type")) for rope in ropes for part in (rope, *rope.values()) if isinstance(part, dict)
    ]
    return "dynamic" in kinds and isinstance(values.get(_TABLE_LENGTH), int)


def _is_open(key: str) -> bool:
    rules = (_NEITHER, _KEY_VALUE_HEADS, _SPECIAL_TOKEN, _RANDOM)
    return not any(rule.fullmatch(key) for rule in rules) and not any(re.fullmatch(pattern, key) for pattern in _SIZES)


def _ascends(value: list[Any]) -> bool:
    """Return whether a list may contain indices of layers."""
    whole = all(isinstance(entry, int) and not isinstance(entry, bool) for entry in value)
    return whole and all(one < other for one, other in itertools.pairwise(value))


def _layer_count(values: Mapping[str, Any]) -> int:
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if isinstance(values.get(key), int):
            return int(values[key])
    for key in ("layers_block_type", "layer_types"):
        if isinstance(values.get(key), list):
            return len(values[key])
    raise ModelError(f"model_type {values.get('model_type')!r}: the configuration names no number of layers")


def _is_per_layer(values: Mapping[str, Any], key: str) -> bool:
    value = values[key]
    if not isinstance(value, list) or len(value) != _layer_count(values):
        return False
    return not (_LAYERS_BY_INDEX.fullmatch(key) and _ascends(value))


def _own_settings(values: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return what the configuration says about single layers: settings by the index of the layer."""
    return {int(index): settings for index, settings in (values.get("per_layer_config") or {}).items()}


def choose_layers(values: Mapping[str, Any], first: int = 0) -> Layers:
    """Return a few layers, at least two, that show every kind of layer in per-layer settings; `first` is as in `Layers`.

    Raises:
        ModelError: the configuration names no number of layers.
    """
    count = _layer_count(values)
    lists = [values[key] for key in values if _is_per_layer(values, key)]
    own = _own_settings(values)
    named = [
        value
        for key, value in values.items()
        if _LAYERS_BY_INDEX.fullmatch(key) and isinstance(value, list) and value and _ascends(value)
    ]
    kinds: dict[str, int] = {}
    sharing = count - (values.get(_SHARING) or 0)
    for index in range(count):
        kind = (
            [entries[index] for entries in lists],
            own.get(index),
            [index + first in indices for indices in named],
            index >= sharing,
        )
        kinds.setdefault(repr(kind), index)
    chosen = sorted(kinds.values())[:_MAX_LAYERS]
    wanted = min(count, max(2, len(chosen), 2 * (values.get("decoder_sparse_step") or 1)), _MAX_LAYERS)
    chosen += [index for index in range(count) if index not in chosen][: wanted - len(chosen)]
    return Layers(tuple(sorted(chosen)), first)


def _shrink_own(key: str, value: Any, values: Mapping[str, Any], sizes: _Sizes) -> Any:
    """Shrink a setting of one layer so that its ratio to the other layers' setting stays the same."""
    small, common = sizes.of(key, value), values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not isinstance(common, int) or value % common:
        return small
    return sizes.of(key, common) * (value // common)


def _smaller(key: str, value: int, size: int) -> int:
    # Widths and head counts only fit each other as a set, so small values of the model are not kept.
    fixed = re.fullmatch(
        r"(hidden_size|n_embd|d_model|head_dim|num_attention_heads|n_heads?|v_head_dim|rotary_dim|qk_\w+)", key
    )
    return size if fixed else min(value, size)


def _shrink_rope(rope: Any, sizes: _Sizes, width: int, *, scaled: bool) -> Any:
    """Shrink the settings by which rotary tables of heads of `width` are made: lists of factors per pair of dimensions get
    shorter.

    Sections by kind of position have no effect on text alone; plain tables are those without a scaling.
    """
    if not isinstance(rope, dict):
        return rope
    if any(isinstance(value, dict) for value in rope.values()):
        return {key: _shrink_rope(value, sizes, width, scaled=scaled) for key, value in rope.items()}
    kept = {"rope_type": "default"} | {key: value for key, value in rope.items() if value is not None}
    kept["rope_theta"] = min(kept.get("rope_theta", 10000.0), 10000.0)
    if not scaled:
        return {key: kept[key] for key in ("partial_rotary_factor", "rope_theta") if key in kept} | {"rope_type": "default"}
    pairs = int(width * kept.get("partial_rotary_factor", 1.0)) // 2
    for key, value in rope.items():
        if isinstance(value, list):
            factors = value if all(isinstance(entry, int | float) for entry in value) and key.endswith("factor") else []
            kept[key] = [factors[place * len(factors) // pairs] for place in range(pairs)] if factors else None
        elif not isinstance(value, bool) and isinstance(value, int | float) and key != "rope_theta":
            kept[key] = sizes.of(key, value)
    return {key: value for key, value in kept.items() if value is not None}
