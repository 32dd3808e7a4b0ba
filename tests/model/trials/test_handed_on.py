"""What blocks hand to one another besides hidden states goes where it is wanted, stays for recompute, and is counted."""

import json
from typing import Any

import pytest
import torch
from tiers import sampled
from tiny_architectures import flats_of, make_plain
from transformers import CONFIG_MAPPING

from headrace.model import Chain, MicroBatch, profile, self_check
from headrace.model.trials.thresholds import architecture_key
from headrace.terms.errors import ModelError
from headrace.terms.options.optimizer import Optimizer

# Two blocks choose keys, and two attend to what the one before chose.
PATTERN = {
    "num_hidden_layers": 4,
    "indexer_types": ["full", "full", "shared", "shared"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}


@pytest.mark.parametrize(
    ("kind", "values"),
    sampled([("glm_moe_dsa", {}), ("glm_moe_dsa", PATTERN), ("hy_v4", {}), ("rwkv", {})], [("glm_moe_dsa", PATTERN)]),
)
def test_gradients_are_those_of_the_whole_model(kind: str, values: dict[str, Any]) -> None:
    self_check(CONFIG_MAPPING[kind](**values))


@pytest.mark.wide
def test_it_stays_where_a_later_block_takes_it_and_nowhere_else() -> None:
    values = json.loads(architecture_key(CONFIG_MAPPING["glm_moe_dsa"]()))
    config = CONFIG_MAPPING["glm_moe_dsa"](**{name: value for name, value in values.items() if name != "layer_types"} | PATTERN)
    chain, ids = Chain.from_config(config, "float32", Optimizer()), torch.arange(2, 34).reshape(2, 16)
    costs = profile(chain, 2, 16)
    for unit, flat in enumerate(flats_of(chain, make_plain(config))):
        chain.bind(unit, flat, None)
    with torch.no_grad():
        start = chain.prologue(MicroBatch(ids, ids))
        hidden = start.hidden
        for index, call in enumerate(start.calls):
            hidden = chain.block(index, hidden, call).hidden
    kept = [[hand.value for hand in call.hands if hand] for call in start.calls]
    assert [len(values) for values in kept] == [0, 1, 1, 0]
    (chosen,), (passed_on,) = kept[1:3]
    assert chosen is passed_on
    assert start.calls[2].arguments()[1]["prev_topk_indices"] is chosen
    tables = sum(table.nbytes for table in start.calls[0].kwargs["position_embeddings"])
    assert costs.call_bytes >= chosen.nbytes + tables


def test_what_can_have_a_gradient_is_refused_in_words() -> None:
    with pytest.raises(ModelError, match=r"ZayaDecoderLayer: .* hidden states: \(1, 13, 11\) of torch.float32, which can"):
        self_check(CONFIG_MAPPING["zaya"]())
