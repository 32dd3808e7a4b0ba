"""Numbers of a configuration beyond which something is computed otherwise: the trial goes beyond them, or rows stay below."""

import contextlib
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from tiers import sampled
from tiny_architectures import make_plain
from tiny_sizes import SIZES
from transformers import CONFIG_MAPPING, LlamaConfig

from headrace.flow.step.step_batch import check_apart
from headrace.model import Chain, self_check
from headrace.model.trials.thresholds import tiny_of
from headrace.terms.errors import DataError, ModelError
from headrace.terms.options.optimizer import Optimizer

_LLAMA4 = {**SIZES, "head_dim": 16, "intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1}
_PHI3 = {
    **SIZES,
    "pad_token_id": 0,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 1024,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
}


def chain_of(kind: str, **values: Any) -> Chain:
    return Chain.from_config(CONFIG_MAPPING[kind](**values), "float32", Optimizer())


def packs_as_alone(kind: str, values: dict[str, Any], length: int) -> bool:
    """Whether a stock model computes of a sample in the second half of a row of `length` what it does of the sample alone."""
    model = make_plain(CONFIG_MAPPING[kind](**values)).eval()
    ids = torch.randint(2, 160, (1, length), generator=torch.Generator().manual_seed(1))
    half = length // 2
    positions = torch.cat([torch.arange(half), torch.arange(length - half)])[None]
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits[:, half:]
        alone = model(ids[:, half:], use_cache=False).logits
    return float((packed - alone).abs().max()) < 1e-4 * float(alone.abs().max())


@pytest.mark.wide
@pytest.mark.parametrize("floor_scale", sampled([32, 64, 8192]))
def test_rows_that_reach_a_temperature_by_the_place_in_the_row_are_run_sample_by_sample(floor_scale: int) -> None:
    """Llama 4 counts from the beginning of the row, whatever the positions say."""
    values = {**_LLAMA4, "floor_scale": floor_scale, "attn_scale": 1.0, "no_rope_layers": [1, 0, 1]}
    chain = chain_of("llama4_text", **values)
    assert chain.packs(floor_scale - 1)
    assert [chain.runs_by_samples(length) for length in (floor_scale - 1, floor_scale)] == [False, True]
    assert f"floor_scale {floor_scale}" in chain.packing_reason
    if floor_scale < 100:
        assert packs_as_alone("llama4_text", values, floor_scale - 1)
        assert not packs_as_alone("llama4_text", values, 2 * floor_scale)


def test_rows_that_reach_tables_by_the_longest_position_are_run_sample_by_sample_too() -> None:
    """Phi-3's long factors hold for a whole batch as soon as one of its positions is beyond the original length."""
    chain = chain_of("phi3", **_PHI3)
    self_check(chain.config)
    assert [chain.runs_by_samples(length) for length in (1023, 1024)] == [False, True]
    assert "original_max_position_embeddings 1024" in chain.packing_reason


def test_temperatures_by_position_limit_nothing() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
    values = {
        **SIZES,
        "head_dim": 16,
        "rope_parameters": {**rope, "llama_4_scaling_beta": 0.1, "max_position_embeddings": 4096},
    }
    assert chain_of("ministral3", **values).packs(4096)


@pytest.mark.parametrize(
    ("kind", "values", "name"),
    sampled(
        [
            ("llama4_text", {"floor_scale": 8192}, "floor_scale"),
            ("deepseek_v32", {"index_topk": 2048}, "index_topk"),
            ("mistral", {"sliding_window": 4096}, "sliding_window"),
            ("doge", {"keep_window_size": 2048}, "keep_window_size"),
            ("qwen2", {"tokens_before_it_changes": 5000}, "tokens_before_it_changes"),
            ("qwen2", {"inner": {"tokens_before_it_changes": 5000.0}}, "tokens_before_it_changes"),
        ]
    ),
)
def test_the_rows_of_the_trial_go_beyond_every_number_that_may_be_a_count_of_tokens(
    kind: str, values: dict[str, Any], name: str
) -> None:
    """Also those that nobody knows."""
    tiny = tiny_of(CONFIG_MAPPING[kind](**values))
    assert name in tiny.met
    assert not tiny.unmet
    (found,) = {float(word.split(",")[0].split("}")[0]) for word in tiny.key.split(f'"{name}":')[1:]}
    assert found <= 11


def test_a_number_that_no_tiny_instance_can_go_beyond_limits_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that asks for at least 64 of something, and has no parameter by it."""
    from transformers.models.qwen2 import modeling_qwen2

    original = modeling_qwen2.Qwen2ForCausalLM.__init__

    def checked(self: Any, config: Any) -> None:
        if config.needs_many < 64:
            raise ValueError("needs_many is below 64")
        original(self, config)

    monkeypatch.setattr(modeling_qwen2.Qwen2ForCausalLM, "__init__", checked)
    chain = chain_of("qwen2", **SIZES, needs_many=512)
    assert chain.packs(511)
    assert not chain.packs(512)
    assert "needs_many 512" in chain.packing_reason
    for length in (511, 512):  # such rows are refused before a step
        batch = {"input_ids": torch.zeros(1, length), "position_ids": (torch.arange(length) % 5)[None]}
        with pytest.raises(DataError, match="needs_many 512") if length == 512 else contextlib.nullcontext():
            check_apart(batch, chain)
    alone = torch.arange(600)[None]
    check_apart({"input_ids": alone, "position_ids": alone}, chain)


def test_numbers_that_fit_one_another_are_lowered_together() -> None:
    """Qwen4-Exp: a width that heads of n-grams share, a table too large to be made, a budget in blocks of some tokens."""
    keys = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_compress_ratio": 16}
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    values = {**keys, "indexer_budget": 2048, "eos_token_id": 1, "ple_layer_ids": [2], "rope_parameters": rope}
    tiny = tiny_of(CONFIG_MAPPING["qwen4_exp_text"](**values))
    assert {"indexer_budget", "indexer_compress_ratio", "ngram_vocab_size_base"} <= set(tiny.met)
    assert not tiny.unmet
    assert tiny.chosen["ple_embed_dim"] == 16


def test_sizes_that_others_have_to_fit_limit_nothing() -> None:
    """Keys that nobody knows, and with which the shapes of parameters go."""
    for kind in ("minicpm3", "jetmoe", "xglm", "modernbert-decoder"):
        assert not tiny_of(CONFIG_MAPPING[kind]()).unmet, kind


@pytest.mark.parametrize("kind", ["phi3", "llama4_text", "gpt_oss", "deepseek_v32"])
def test_beyond_every_such_number_gradients_are_those_of_the_whole_model(kind: str) -> None:
    self_check(CONFIG_MAPPING[kind]())


@pytest.mark.parametrize("kind", sampled(("falcon_h1", "longcat_flash", "kimi_linear", "bailing_hybrid"), ("falcon_h1",)))
def test_sizes_that_go_together_shrink_together(kind: str) -> None:
    self_check(CONFIG_MAPPING[kind]())


@pytest.mark.parametrize(
    "kind", sampled([KeyError, RuntimeError, TypeError, ZeroDivisionError, StrictDataclassClassValidationError])
)
def test_whatever_a_configuration_raises_as_it_is_shrunk_is_a_refusal(kind: type[Exception]) -> None:
    class Picky(LlamaConfig):
        """Has rules of its own, which no tiny instance meets."""

        def __init__(self, **values: Any) -> None:
            super().__init__(**values)
            if self.hidden_size < 1024:
                raise (
                    kind("rules", ValueError("too small")) if kind is StrictDataclassClassValidationError else kind("too small")
                )

    with pytest.raises(ModelError, match=f"Picky: cannot make a tiny instance for checking: {kind.__name__}: .*too small"):
        tiny_of(Picky(hidden_size=2048))
