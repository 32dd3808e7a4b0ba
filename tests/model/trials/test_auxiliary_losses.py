"""What a model adds to its loss is found by trying, whatever the keys of its configuration are called that decide it."""

import json
from typing import Any

import pytest
import torch
from tiers import sampled
from transformers import CONFIG_MAPPING

from headrace.model import self_check
from headrace.model.trials.instance import tiny_model, tiny_samples
from headrace.model.trials.probe import probe
from headrace.model.trials.thresholds import architecture_key
from headrace.terms.errors import ModelError

ROUTED = (
    "deepseek_v4",
    "ernie4_5_moe",
    "flex_olmo",
    "flint",
    "gpt_oss",
    "granitemoe",
    "granitemoehybrid",
    "jamba",
    "jetmoe",
    "laguna",
    "mellum",
    "minimax",
    "minimax_m2",
    "minimax_m3_vl_text",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
)


def loss_of(config: Any) -> float:
    model = tiny_model(type(config), architecture_key(config)).train()
    sample = tiny_samples(model)[0]
    with torch.no_grad():
        return float(model(input_ids=sample.input_ids, labels=sample.labels, use_cache=False).loss)


@pytest.mark.parametrize("kind", sampled(ROUTED, ("jetmoe", "mixtral")))
def test_every_number_that_moves_the_auxiliary_loss_alone_is_found(kind: str) -> None:
    switched_on = CONFIG_MAPPING[kind](output_router_logits=True)
    assert probe(switched_on).has_aside_loss
    before, moved = loss_of(switched_on), []
    for name, value in json.loads(switched_on.to_json_string()).items():
        if isinstance(value, float) and "coef" in name:
            config = CONFIG_MAPPING[kind](output_router_logits=True, **{name: 0.3})
            self_check(config)
            moved += [name] * (loss_of(config) != before)
    assert moved


@pytest.mark.parametrize("kind", sampled(["afmoe", "doge"]))
def test_a_switch_for_an_auxiliary_loss_that_a_model_does_not_have_is_no_obstacle(kind: str) -> None:
    config = CONFIG_MAPPING[kind](output_router_logits=True)
    assert not probe(config).has_aside_loss
    self_check(config)


def test_what_a_model_adds_to_the_loss_besides_is_refused_with_the_key_that_decides_it() -> None:
    """Bamba can add the squared logarithm of what its logits sum to."""
    with pytest.raises(ModelError, match=r"with z_loss_coefficient 0 instead of 0\.25 they agree"):
        self_check(CONFIG_MAPPING["bamba"](z_loss_coefficient=0.25))
