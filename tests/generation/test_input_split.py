"""How many tokens are kept as inputs: the formula against every split, and against published and computed figures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from input_split import TokenSeconds

SECONDS = st.floats(1e-6, 1.0)


@given(SECONDS, SECONDS, SECONDS, st.integers(1, 300))
def test_the_formula_is_the_best_of_all_splits(given_input: float, cache: float, recompute: float, tokens: int) -> None:
    each = TokenSeconds(given_input, cache, recompute)
    best = min(each.of_split(tokens, kept) for kept in range(tokens + 1))
    # The best whole number is one of the two neighbours, and no whole number beats the formula's.
    exact = each.best_share() * tokens
    near = min(each.of_split(tokens, kept) for kept in {int(exact), min(tokens, int(exact) + 1)})
    assert near == pytest.approx(best, rel=1e-9)
    assert each.of_split(tokens, exact) <= best * (1 + 1e-9)


def test_the_case_of_the_paper_keeps_721_of_1024_tokens() -> None:
    """OPT-6.7B on an A100 at 312 TFLOP/s behind a link of 32 GB/s."""
    each = TokenSeconds.of(4096, 4096, flops_per_second=312e12, bytes_per_second=32e9)
    assert round(each.best_share() * 1024) == 721
    assert min(range(1025), key=lambda kept: each.of_split(1024, kept)) == 721
    assert each.of_split(1024, 0) / each.of_split(1024, 721) == pytest.approx(1.54, rel=0.01)


def test_grouped_queries_keep_nothing_as_inputs() -> None:
    """Llama-3-8B: an input has as many bytes as four tokens' keys, or two tokens' keys and values."""
    assert TokenSeconds.of(4096, 1024, flops_per_second=312e12, bytes_per_second=32e9).best_share() == 0


# Hidden size, numbers of a token's keys, and the gain over moving all keys and values on three machines.
GAINS = {
    "multi-head": (4096, 4096, (1.42, 1.75, 1.01)),
    "gemma-7b": (3072, 4096, (1.70, 2.26, 1.01)),
    "qwen3-0.6b": (1024, 1024, (1.74, 1.92, 1.03)),
    "gemma-2-9b": (3584, 2048, (1.08, 1.12, 1.00)),
    "gemma-3-12b": (3840, 2048, (1.04, 1.06, 1.00)),
}
# A GPU behind a link, the same with caches on drives, and a processor with a drive: products and bytes a second.
MACHINES = ((150e12, 25e9), (150e12, 6e9), (150e9, 2e9))


@pytest.mark.parametrize("name", GAINS)
def test_gains_of_known_models(name: str) -> None:
    hidden, keys, gains = GAINS[name]
    for (flops, rate), gain in zip(MACHINES, gains, strict=True):
        each = TokenSeconds.of(hidden, keys, flops_per_second=flops, bytes_per_second=rate)
        tokens = 1024
        found = each.of_split(tokens, 0) / each.of_split(tokens, each.best_share() * tokens)
        assert found == pytest.approx(gain, rel=0.05)
