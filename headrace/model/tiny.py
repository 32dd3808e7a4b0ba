"""Shrink a configuration to a tiny instance of the same architecture.

What the chain must know about an architecture (what its blocks return, which parameters come before and after them, whether
packed samples stay apart) is found by trying, on an instance of a few kilobytes. Invariant: shrinking changes sizes, never
structure: switches, layer patterns, tying, scalings and the kind of head sharing stay as they are.
"""

import re
from typing import Any

from headrace.terms.errors import ModelError

_HEAD_DIM = 16
_NUM_HEADS = 4
_HIDDEN = _HEAD_DIM * _NUM_HEADS
_VOCABULARY = 97
_MAX_LAYERS = 4

# Canonical keys of transformers 5 configurations and the size each gets. A value that is smaller already is kept.
_SIZES = {
    r"(num_hidden_layers|n_layers?|num_layers)": None,  # decided from the layer pattern
    r"(vocab_size|vocab_size_per_layer_input)": _VOCABULARY,
    r"(hidden_size|n_embd|d_model)": _HIDDEN,
    r"(head_dim|global_head_dim|d_kv|v_head_dim|rotary_dim)": _HEAD_DIM,
    r"qk_nope_head_dim": _HEAD_DIM,
    r"qk_rope_head_dim": _HEAD_DIM // 2,
    r"(kv_lora_rank|q_lora_rank)": 16,
    r"(num_attention_heads|n_heads?)": _NUM_HEADS,
    r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length)": 128,
    r"(sliding_window|attention_chunk_size|window_size)": 8,
    r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts)": 4,
    r"(num_experts_per_tok|moe_topk|moe_k)": 2,
    r"n_group": 2,
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
# Number and width of a state-space layer's heads, and the expansion of the model's width that they share out.
_STATE_SPACE_HEADS = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ("mamba_num_heads", "mamba_head_dim", "expand"),
    ("num_heads", "head_dim", "expand"),
)
_KEY_VALUE_HEADS = re.compile(r"(num_key_value_heads|num_kv_heads|num_global_key_value_heads|n_head_kv)")
_SPECIAL_TOKEN = re.compile(r"(pad|bos|eos|sep|decoder_start|image|audio|video)_token_(id|index)")
_LAYERS_BY_INDEX = ("mlp_only_layers", "attn_layer_indices")
_RANDOM = re.compile(r"(\w*_)?(dropout|pdrop|jitter_noise)(_prob|_rate)?")
_DROPPED = ("qk_head_dim", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "architectures")


def shrink(config: Any) -> Any:
    """Return a tiny configuration of the class of `config`, without dropout.

    Raises:
        ModelError: the architecture does not accept the shrunk sizes.
    """
    values = config.to_dict()
    small = {key: value for key, value in values.items() if key not in _DROPPED}
    layers = _choose_layers(values)
    heads = next((values[key] for key in ("num_attention_heads", "n_head", "n_heads") if values.get(key)), None)
    for key, value in values.items():
        if key in small:
            small[key] = _pick(value, layers) if _is_per_layer(values, value) else _shrink_value(key, value, layers, heads)
    own = _own_settings(values)
    if own:
        small["per_layer_config"] = {
            place: {key: _shrink_own(key, value, values, layers, heads) for key, value in own[index].items()}
            for place, index in enumerate(layers)
            if index in own
        }
    for count, width, expand in _STATE_SPACE_HEADS:
        if all(isinstance(values.get(key), int) for key in (count, width, expand)):
            small[count] = values[expand] * _HIDDEN // _HEAD_DIM  # heads times their width is the expanded width
    if "qk_rope_head_dim" in values:
        small.pop("head_dim", None)  # derived by the architecture
    if values.get("word_embed_proj_dim") not in (None, values.get("hidden_size")):
        small["word_embed_proj_dim"] = _HIDDEN // 2  # a narrower embedding is structure, not size
    elif "word_embed_proj_dim" in values:
        small["word_embed_proj_dim"] = small["hidden_size"]
    try:
        return type(config)(**small)
    except Exception as error:  # whatever validation the configuration class does
        raise ModelError(f"{type(config).__name__}: cannot make a tiny instance for checking: {error!r}") from error


def _layer_count(values: dict[str, Any]) -> int:
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if isinstance(values.get(key), int):
            return int(values[key])
    for key in ("layers_block_type", "layer_types"):
        if isinstance(values.get(key), list):
            return len(values[key])
    raise ModelError(f"model_type {values.get('model_type')!r}: the configuration names no number of layers")


def _is_per_layer(values: dict[str, Any], value: Any) -> bool:
    return isinstance(value, list) and len(value) == _layer_count(values)


def _own_settings(values: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return what the configuration says of single layers: settings by the index of the layer."""
    return {int(index): settings for index, settings in (values.get("per_layer_config") or {}).items()}


def _pick(value: list[Any], layers: list[int]) -> list[Any]:
    return [value[index] for index in layers]


def _choose_layers(values: dict[str, Any]) -> list[int]:
    """Return indices of few layers that show every kind of layer in what is said per layer, at least two, in order."""
    count = _layer_count(values)
    lists = [value for value in values.values() if _is_per_layer(values, value)]
    own = _own_settings(values)
    named = [values[key] for key in _LAYERS_BY_INDEX if values.get(key)]
    kinds: dict[str, int] = {}
    for index in range(count):
        kind = ([entries[index] for entries in lists], own.get(index), [index in indices for indices in named])
        kinds.setdefault(repr(kind), index)
    chosen = sorted(kinds.values())[:_MAX_LAYERS]
    wanted = min(count, max(2, len(chosen), 2 * (values.get("decoder_sparse_step") or 1)), _MAX_LAYERS)
    chosen += [index for index in range(count) if index not in chosen][: wanted - len(chosen)]
    return sorted(chosen)


def _shrink_value(key: str, value: Any, layers: list[int], heads: int | None) -> Any:
    if key in ("rope_parameters", "rope_scaling"):
        return _plain_rope(value)
    if _RANDOM.fullmatch(key) and isinstance(value, float):
        return 0.0
    if _SPECIAL_TOKEN.fullmatch(key):
        return None if value is None else 0 if key == "pad_token_id" else 1
    if key in _LAYERS_BY_INDEX and isinstance(value, list):
        return [place for place, index in enumerate(layers) if index in value]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if _KEY_VALUE_HEADS.fullmatch(key):
        return _NUM_HEADS if value == heads else 1 if value == 1 else _NUM_HEADS // 2
    for pattern, size in _SIZES.items():
        if re.fullmatch(pattern, key):
            return len(layers) if size is None else _smaller(key, value, size)
    return value


def _shrink_own(key: str, value: Any, values: dict[str, Any], layers: list[int], heads: int | None) -> Any:
    """Shrink a setting of one layer so that it stays as many times what the other layers have as it was."""
    small, common = _shrink_value(key, value, layers, heads), values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not isinstance(common, int) or value % common:
        return small
    return _shrink_value(key, common, layers, heads) * (value // common)


def _smaller(key: str, value: int, size: int) -> int:
    # Widths and head counts fit each other only as a set, so they are not kept even where the model has smaller ones.
    fixed = re.fullmatch(
        r"(hidden_size|n_embd|d_model|head_dim|num_attention_heads|n_heads?|v_head_dim|rotary_dim|qk_\w+)", key
    )
    return size if fixed else min(value, size)


def _plain_rope(rope: Any) -> Any:
    """Replace scaled rotary tables by plain ones: their lists of factors have the length of the full head."""
    if not isinstance(rope, dict):
        return rope
    if any(isinstance(value, dict) for value in rope.values()):
        return {key: _plain_rope(value) for key, value in rope.items()}
    kept = {key: rope[key] for key in ("partial_rotary_factor", "rope_theta") if rope.get(key) is not None}
    return {"rope_type": "default", "rope_theta": 10000.0, **kept}
