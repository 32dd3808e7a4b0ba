"""Packed rows give the loss of their samples alone, also where masks have to keep these apart."""

from typing import Any

import pytest
import torch
from tiers import sampled
from tiny_architectures import CONFIGS, flats_of, make_config, make_plain
from transformers import CONFIG_MAPPING

from headrace.model import IGNORED, Chain, MicroBatch, probe
from headrace.terms.optimizer import AdamW

LENGTHS = (9, 7, 5)
PACKED_BY_MASKS = ("opt", "gpt-oss", "falcon")


@pytest.mark.parametrize("name", PACKED_BY_MASKS)
def test_a_packed_row_computes_what_its_samples_do_alone(name: str) -> None:
    config = make_config(CONFIGS[name])
    plain = make_plain(config).eval()
    chain = Chain.from_config(config, "float32", AdamW())
    assert chain.packs_by_masks
    chain.model.eval()
    for unit, flat in enumerate(flats_of(chain, plain)):
        chain.bind(unit, flat, None)
    ids = torch.randint(2, 160, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1).contiguous()
    with torch.no_grad():
        start = chain.prologue(MicroBatch(ids, ids, position_ids=positions))
        hidden = start.hidden
        for index, call in enumerate(start.calls):
            hidden = chain.block(index, hidden, call).hidden
        targets = torch.cat([torch.nn.functional.pad(part[:, 1:], (0, 1), value=IGNORED) for part in ids.split(LENGTHS, 1)], 1)
        packed = float(chain.loss_sum(ids, hidden, targets))
        alone = 0.0
        for part in ids.split(LENGTHS, 1):
            logits = plain(part, use_cache=False).logits[:, :-1]
            alone += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    assert packed == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("kind", sampled(("afmoe", "gpt_oss", "falcon", "mpt", "opt", "xglm", "biogpt"), ("gpt_oss", "mpt")))
def test_masks_keep_samples_apart(kind: str) -> None:
    traits = probe(CONFIG_MAPPING[kind]())
    assert traits.packs_by_masks
    assert traits.packing_limit is None


def test_layers_with_a_state_are_not_packed_and_it_is_said_why() -> None:
    traits: Any = probe(CONFIG_MAPPING["qwen3_next"]())
    assert traits.packing_limit == 0
    assert "see each other" in traits.packing_reason
