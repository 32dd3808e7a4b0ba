"""Mixtures none of whose blocks fits a card of 24 GB are planned from their configuration alone: experts come one at a time.

Blocks have their real size, and there are few of them: what the device needs does not depend on their number.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.ask.answer import plan_model
from headrace.terms.options.options import Options
from headrace.terms.sizes import GIB

pytestmark = [pytest.mark.deep, pytest.mark.timeout(1200)]

QWEN3_235B = {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "num_hidden_layers": 3,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 1536,
    "intermediate_size": 12288,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
GPT_OSS_120B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "sliding_window": 128,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "vocab_size": 129280,
}
# As published: the weights are coded, and there is only the configuration.
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
GIANTS = {
    "Qwen3-235B": (QWEN3_235B, "rtx4090-4ssd"),
    "gpt-oss-120b in MXFP4": (GPT_OSS_120B | {"quantization_config": MXFP4}, "rtx4090-4ssd"),
    "DeepSeek-V3 in FP8": (DEEPSEEK_V3 | {"quantization_config": FP8}, "rtx4090-12ssd"),
}


@pytest.mark.parametrize("name", GIANTS)
def test_a_giant_is_trained_on_one_card(name: str, tmp_path: Path) -> None:
    sizes, machine = GIANTS[name]
    config: dict[str, Any] = {**sizes, "dtype": "bfloat16", "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    options = Options(machine=machine, host_memory="224GiB", device_memory="22GiB", tokens_per_step=16384, sequence_length=2048)
    plan = plan_model(tmp_path, options, here=False).plan
    assert plan.fits
    assert plan.peak("device") <= 22 * GIB
    assert plan.experts is not None
    assert plan.experts.is_trained
    assert any("experts come one at a time" in note for note in plan.results.notes)
    assert any("planned as decoded" in note for note in plan.results.notes) == ("quantization_config" in sizes)


def test_compute_hardly_waits_in_blocks_of_175_billion_parameters(tmp_path: Path) -> None:
    """Two of them have room on the card: weights come in pages, and compute waits for gradients that leave, hardly more."""
    sizes = {"hidden_size": 12288, "ffn_dim": 49152, "num_attention_heads": 96, "word_embed_proj_dim": 12288}
    config = {"model_type": "opt", **sizes, "num_hidden_layers": 96, "vocab_size": 50272, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    asked: dict[str, Any] = {"host_memory": "224GiB", "device_memory": "23GiB", "max_grad_norm": None}
    options = Options(machine="rtx4090-12ssd", tokens_per_step=16384, sequence_length=1024, **asked)
    report = plan_model(tmp_path, options, here=False, variants_seconds=0.0)
    assert report.plan is not None
    assert report.forecast is not None
    assert report.plan.fits
    assert report.plan.batch.pages
    assert report.forecast.step_seconds < 1.2 * report.forecast.lower_bound_seconds
