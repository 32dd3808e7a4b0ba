"""Prompts are put into micro-batches: each into one, with others of its kind and about its length, evenly."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from headrace.generate.plan.compose import composed

PROMPTS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=40)


def tokens_of(batch: tuple[int, ...], lengths: list[int]) -> int:
    """What a seat computes: each row is filled up to the longest."""
    return len(batch) * max(lengths[index] for index in batch)


@given(PROMPTS, st.integers(1, 9))
def test_each_prompt_is_in_one_micro_batch_of_its_kind(prompts: list[tuple[int, int]], rows: int) -> None:
    lengths, kinds = [length for length, _ in prompts], [kind for _, kind in prompts]
    batches = composed(lengths, kinds, rows)
    assert sorted(index for batch in batches for index in batch) == list(range(len(prompts)))
    assert all(1 <= len(batch) <= rows for batch in batches)
    assert all(len({kinds[index] for index in batch}) == 1 for batch in batches)
    for kind in set(kinds):
        spans = [sorted(lengths[index] for index in batch) for batch in batches if kinds[batch[0]] == kind]
        assert all(first[0] >= second[-1] for first, second in itertools.pairwise(spans))
        assert len(spans) == -(-kinds.count(kind) // rows)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 5))
def test_the_largest_micro_batch_is_the_smallest_that_any_cut_gives(lengths: list[int], rows: int) -> None:
    found = composed(lengths, [0] * len(lengths), rows)
    ordered, count = sorted(lengths, reverse=True), -(-len(lengths) // rows)
    sizes = (each for each in itertools.product(range(1, rows + 1), repeat=count) if sum(each) == len(lengths))
    starts = ([0, *itertools.accumulate(each)] for each in sizes)
    best = min(max((stop - start) * ordered[start] for start, stop in itertools.pairwise(each)) for each in starts)
    assert max(tokens_of(batch, lengths) for batch in found) == best


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 50))
def test_prompts_of_one_length_are_shared_out_evenly(count: int, rows: int, length: int) -> None:
    sums = [tokens_of(batch, [length] * count) for batch in composed([length] * count, [0] * count, rows)]
    assert max(sums) - min(sums) <= length
