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
    "strategy": (None, "group", "channel", "tensor", "block", "tensor_group"),
    "dynamic": (False, None),
    "actorder": (None, False, "weight", "static", "group", "dynamic"),
}
# How AWQ and GPTQ rounded once, and programs that multiply by their codes.
_ROUNDED: Mapping[str, Rule] = {
    **anything("quant_method", "group_size", "desc_act", "sym", "meta", "backend", "modules_in_block_to_quantize"),
    **anything("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "act_group_aware", "quantizer"),
    **anything("dataset", "tokenizer", "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block"),
    **anything("batch_size", "pad_token_id", "use_cuda_fp16", "use_exllama", "exllama_config", "max_input_length"),
    **anything("cache_block_outputs", "disable_exllama", "model_name_or_path", "model_file_base_name"),
    **anything("modules_to_not_convert"),
}
# By `quant_method` of others. Caches in few bits and rotated inputs are not computed. Rounded activations are not either, but
# products of decoded weights are closer to the model that was coded (`notes_on_activations`).
KEYS: Mapping[str, Mapping[str, Rule]] = {
    "compressed-tensors": {
        **anything("quant_method", "format", "ignore", "quantization_status", "version", "dequantize"),
        **anything("global_compression_ratio", "run_compressed"),
        "config_groups": Each({**anything("targets", "format", "input_activations"), "weights": _ARGUMENTS}),
        "sparsity_config": {
            "format": ("dense", None),
            **anything("registry_requires_subclass", "targets", "ignore"),
        },
    },
    "fp8": {
        **anything("quant_method", "weight_block_size", "modules_to_not_convert", "modules_to_convert"),
        **anything("dequantize", "scale_fmt"),
        # transformers rounds activations to FP8, too; here products are those of the decoded weights (docs/published.md).
        "activation_scheme": ("dynamic", "static", None),
        "fmt": ("e4m3", None),
        "expert_dtype": ("fp8", "fp4", None),
    },
    "modelopt": {
        **anything("quant_method", "ignore", "exclude_modules", "group_size", "producer"),
        "quant_algo": ("NVFP4", "FP8"),
        "config_groups": Each({**anything("targets", "input_activations"), "weights": _ARGUMENTS}),
    },
    "awq": {
        **_ROUNDED,
        **anything("q_group_size", "zero_point", "do_fuse", "fuse_max_seq_len", "modules_to_fuse"),
        **dict.fromkeys(("bits", "w_bit"), (4,)),
        **dict.fromkeys(("version", "format", "checkpoint_format"), ("gemm", "GEMM")),
    },
    "gptq": {
        **_ROUNDED,
        "bits": (4, 8),
        "checkpoint_format": ("gptq", "gptq_v2"),
        "format": ("gptq", "gptq_v2"),
        "pack_dtype": ("int32",),
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


def notes_on_activations(described: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note where a `quantization_config` says that activations are rounded, too."""
    groups = (described.get("config_groups") or {}).values()
    given = any(isinstance(group, Mapping) and group.get("input_activations") for group in groups)
    if not (given or described.get("activation_scheme") or described.get("quant_algo")):
        return ()
    return (
        "its quantization_config rounds activations; here they stay as computed, and products are those of decoded weights",
    )


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
