"""The keys of `quantization_config`: which are computed, which do not affect results, and which are refused.

Invariant: no key that may change results is passed over; one that is not known must be null, false or empty.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

Rule = Any
"""What a key may hold: ANY, one of several values, a table for an object, or `Each` for an object of such objects."""

ANY = object()


def anything(*keys: str) -> Mapping[str, Rule]:
    """Return the rules of keys that may hold anything."""
    return dict.fromkeys(keys, ANY)


class Each(dict[str, Rule]):
    """The rules of each entry of an object, whatever its key."""


_ARGUMENTS: Mapping[str, Rule] = {
    # These say how codes are read; the reader computes them from the parts, or refuses them in words of its own.
    **anything("num_bits", "type", "symmetric", "group_size", "block_structure"),
    # How weights were rounded once, which is over.
    **anything("observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
    "strategy": (None, "group", "channel"),
    "dynamic": (False, None),
    "actorder": (None, False, "weight", "static"),
}
# By `quant_method` of others. Activations that are rounded, caches in few bits and rotated inputs are not computed.
KEYS: Mapping[str, Mapping[str, Rule]] = {
    "compressed-tensors": {
        **anything("quant_method", "format", "ignore", "quantization_status", "version", "dequantize"),
        **anything("global_compression_ratio", "run_compressed"),
        "config_groups": Each({"targets": ANY, "format": ANY, "weights": _ARGUMENTS}),
        "sparsity_config": {
            "format": ("dense", None),
            **anything("registry_requires_subclass", "targets", "ignore"),
        },
    },
    "fp8": {
        **anything("quant_method", "weight_block_size", "modules_to_not_convert", "modules_to_convert"),
        **anything("dequantize", "scale_fmt"),
        # transformers rounds activations to FP8, too; here products are those of the decoded weights (docs/published.md).
        "activation_scheme": ("dynamic", None),
        "fmt": ("e4m3", None),
        "expert_dtype": ("fp8", None),
    },
    "mxfp4": anything("quant_method", "modules_to_not_convert", "dequantize", "swizzle"),
    "bitsandbytes": {
        **anything("quant_method", "load_in_4bit", "_load_in_4bit", "bnb_4bit_quant_type"),
        **anything("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_use_double_quant"),
        # Of eight bits, which such files do not have.
        **anything("llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload"),
        **anything("llm_int8_has_fp16_weight", "load_in_8bit", "_load_in_8bit"),
    },
}


def refused_keys(rules: Mapping[str, Rule], described: Mapping[str, Any]) -> list[str]:
    """Return the keys of a `quantization_config`, with their values, that a model with these rules cannot be computed with."""
    return list(_refused(rules, described, ""))


def _refused(rules: Mapping[str, Rule], found: Mapping[str, Any], path: str) -> Iterator[str]:
    for key, value in found.items():
        rule, name = rules.get(key), f"{path}{key}"
        if rule is ANY or _is_empty(value):
            continue
        if isinstance(rule, Each) and isinstance(value, Mapping):
            for entry, values in value.items():
                yield from _refused(dict(rule), values, f"{name}.{entry}.") if isinstance(values, Mapping) else ()
        elif isinstance(rule, Mapping) and isinstance(value, Mapping):
            yield from _refused(rule, value, f"{name}.")
        elif not (isinstance(rule, Collection) and not isinstance(rule, Mapping) and value in rule):
            yield f"{name} ({str(value)[:60]})"


def _is_empty(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, Collection) and len(value) == 0)
