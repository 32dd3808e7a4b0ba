"""Every key of quantization_config is computed, says nothing of results, or is refused by name, at every depth."""

from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from hypothesis import given
from hypothesis import strategies as st
from transformers import AwqConfig, BitsAndBytesConfig, FineGrainedFP8Config, GPTQConfig, Mxfp4Config

from headrace.codec.targets import Int4Target, TernaryTarget
from headrace.model.stored.coded import READERS
from headrace.model.stored.coded_keys import ANY, KEYS, notes_on_activations, refused_keys

OURS: dict[str, dict[str, Any]] = {
    "compressed-tensors": Int4Target().describe({"q_proj": 128, "re:.*down_proj": 64}, ["lm_head"]),
    "headrace": TernaryTarget().describe({}, ["lm_head"]),
    "fp8": FineGrainedFP8Config().to_dict(),
    "mxfp4": Mxfp4Config().to_dict(),
    "bitsandbytes": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4").to_dict(),
    "awq": AwqConfig().to_dict(),
    "gptq": GPTQConfig(bits=4).to_dict(),
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"}},
}


@pytest.mark.parametrize("method", OURS)
def test_what_we_write_and_what_libraries_write_by_default_passes(method: str) -> None:
    assert refused_keys(READERS[method][1], OURS[method]) == []


EMPTY = st.sampled_from([None, False, {}, [], ""])
FULL = st.one_of(st.just(True), st.integers(1), st.text(min_size=1), st.dictionaries(st.text(), st.integers(), min_size=1))
NAMES = st.text(min_size=1).filter(lambda name: all(name not in rules for _, rules in READERS.values()))


@given(st.sampled_from(sorted(OURS)), NAMES, FULL, EMPTY)
def test_a_key_that_is_not_known_is_refused_unless_it_is_empty(method: str, name: str, full: Any, empty: Any) -> None:
    assert refused_keys(READERS[method][1], {**OURS[method], name: empty}) == []
    (refused,) = refused_keys(READERS[method][1], {**OURS[method], name: full})
    assert refused.startswith(f"{name} (")


def at(values: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    head, *rest = path
    return {**values, head: at(dict(values.get(head) or {}), tuple(rest), value) if rest else value}


ACTING = [
    (("transform_config",), {"config_groups": {"u": {"type": "hadamard"}}}),
    (("kv_cache_scheme",), {"num_bits": 8}),
    (("sparsity_config",), {"format": "sparse-24-bitmask"}),
    (("moe_sparsity_config",), {"format": "x"}),
    (("config_groups", "group_0", "output_activations"), {"num_bits": 8}),
    (("config_groups", "group_1", "weights", "actorder"), "other"),
    (("config_groups", "group_0", "weights", "dynamic"), True),
    (("config_groups", "group_0", "weights", "strategy"), "token"),
    (("config_groups", "group_0", "weights", "new_key"), 3),
]


@pytest.mark.parametrize(("path", "value"), ACTING)
def test_what_acts_on_results_is_refused_at_its_depth(path: tuple[str, ...], value: Any) -> None:
    (refused,) = refused_keys(KEYS["compressed-tensors"], at(OURS["compressed-tensors"], path, value))
    assert refused.startswith(".".join(path))


@pytest.mark.parametrize(
    ("method", "path", "value"),
    [
        ("compressed-tensors", ("config_groups", "group_0", "input_activations"), {"num_bits": 8, "dynamic": True}),
        ("fp8", ("activation_scheme",), "static"),
        ("modelopt", ("quant_algo",), "NVFP4"),
    ],
)
def test_rounded_activations_are_passed_over_with_a_note(method: str, path: tuple[str, ...], value: Any) -> None:
    described = at(OURS[method], path, value)
    assert refused_keys(KEYS[method], described) == []
    (note,) = notes_on_activations(described)
    assert "rounds activations" in note
    assert notes_on_activations(OURS["compressed-tensors"]) == ()


def test_each_key_of_the_installed_libraries_is_in_a_table_or_refused() -> None:
    """A new one shows here."""
    known = KEYS["compressed-tensors"]
    groups = known["config_groups"]
    refused = {"kv_cache_scheme", "moe_sparsity_config", "output_activations"}
    assert set(QuantizationConfig.model_fields) <= known.keys() | refused
    assert set(QuantizationScheme.model_fields) <= groups.keys() | refused
    assert set(QuantizationArgs.model_fields) <= groups["weights"].keys()
    for method in ("fp8", "mxfp4", "bitsandbytes", "awq", "gptq"):
        assert OURS[method].keys() <= READERS[method][1].keys(), method
    assert KEYS["fp8"]["scale_fmt"] is ANY
