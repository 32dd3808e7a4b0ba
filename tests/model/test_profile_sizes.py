"""Profiles of one model for micro-batches of several sizes: what they have in common is measured once, and is the same.

Run: pytest tests/model/test_profile_sizes.py
"""

import sys
from typing import Any

import pytest
from tiers import sampled
from tiny_architectures import CONFIGS
from transformers import CONFIG_MAPPING

from headrace.model import Chain, Profiles, profile
from headrace.terms.optimizer import Optimizer

LENGTH = 128


@pytest.mark.parametrize("name", sampled(["llama", "gpt2", "mixtral-routed"], ["mixtral-routed"]))
def test_another_sizes_epilogue_is_this_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, values = CONFIGS[name]
    module = sys.modules["headrace.model.cost_profile"]
    chain = Chain.from_config(CONFIG_MAPPING[kind](**values), "bfloat16", Optimizer())
    profile_loss, chunks = module._profile_loss, []  # type: ignore[attr-defined]

    def counted(*arguments: Any) -> Any:
        chunks.append(arguments[-2])
        return profile_loss(*arguments)

    monkeypatch.setattr(module, "_profile_loss", counted)
    sizes = (1, 5)
    alone = [profile(chain, sequences, LENGTH) for sequences in sizes]
    del chunks[:]
    for other in alone:
        assert [profile(chain, sequences, LENGTH, other=other) for sequences in sizes] == alone
    assert chunks == [256, 512, 1024]  # beside one row, five need larger chunks as well; beside five, none does
    profiles = Profiles(chain)
    for _ in range(2):
        assert [profiles.of(sequences, LENGTH) for sequences in sizes] == alone
    assert chunks == [256, 512, 1024, 16, 64, 128, 256, 512, 1024]  # once each
