"""Profiles of one model for micro-batches of several sizes: what they have in common is measured once, and is the same.

Run: pytest tests/model/costs/test_profile_sizes.py
"""

import sys
from typing import Any

import pytest
from tiers import sampled
from tiny_architectures import CONFIGS
from transformers import CONFIG_MAPPING

from headrace.model import Chain, Profiles, profile
from headrace.model.costs.shape_costs import peaks_of_chunks
from headrace.terms.options.optimizer import Optimizer

LENGTH = 128


@pytest.mark.wide
@pytest.mark.parametrize("name", sampled(["llama", "gpt2", "mixtral-routed"], ["mixtral-routed"]))
def test_another_sizes_epilogue_is_this_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, values = CONFIGS[name]
    chain = Chain.from_config(CONFIG_MAPPING[kind](**values), "bfloat16", Optimizer())
    module = sys.modules["headrace.model.costs.shape_costs"]
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


@pytest.mark.parametrize("name", sampled(sorted(CONFIGS), ["llama"]))
@pytest.mark.parametrize("wide", sampled([False, True]))
def test_chunks_that_are_not_run_have_the_peaks_of_those_that_are(
    name: str, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, values = CONFIGS[name]
    chain = Chain.from_config(CONFIG_MAPPING[kind](**values), "bfloat16", Optimizer())
    if wide:
        chain.multiply_wide()
    length = 2048 if chain.packs(2048) else LENGTH
    found = profile(chain, 2, length, huge_pages=True)
    module = sys.modules["headrace.model.costs.shape_costs"]

    def each(chunks: list[int], run: Any) -> dict[int, int]:
        return {tokens: run(tokens).peak_bytes for tokens in chunks}

    monkeypatch.setattr(module, "peaks_of_chunks", each)
    assert profile(chain, 2, length, huge_pages=True) == found


class Grows:
    """A run that made one tensor of these bytes."""

    def __init__(self, num_bytes: int, history: tuple[int, ...] = (0,)) -> None:
        self.storages, self.history, self.peak_bytes = [num_bytes], history, num_bytes

    def peak_bytes_of(self, storages: list[int]) -> int:
        return storages[0]


@pytest.mark.parametrize(
    ("num_bytes", "runs"),
    [
        (lambda tokens: 8 * tokens, 4),
        (lambda tokens: 3 * tokens * tokens + 5, 4),
        (lambda tokens: max(tokens, 100), 7),  # no polynomial
        (lambda tokens: tokens**3, 7),  # of a higher degree
    ],
)
def test_only_what_grows_evenly_is_not_run(num_bytes: Any, runs: int) -> None:
    chunks, run = [16, 64, 128, 256, 512, 1024, 2048], []

    def measure(tokens: int) -> Any:
        run.append(tokens)
        return Grows(num_bytes(tokens))

    assert peaks_of_chunks(chunks, measure) == {tokens: num_bytes(tokens) for tokens in chunks}
    assert len(run) == runs
    assert peaks_of_chunks([], measure) == {}


def test_where_other_things_are_made_each_chunk_is_run() -> None:
    run = []

    def measure(tokens: int) -> Any:
        run.append(tokens)
        return Grows(8 * tokens, history=(0,) if tokens < 1000 else (0, -1, 0))

    peaks_of_chunks([16, 64, 128, 256, 512, 1024, 2048], measure)
    assert sorted(run) == [16, 64, 128, 256, 512, 1024, 2048]
