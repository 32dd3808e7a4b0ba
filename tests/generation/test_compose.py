"""Prompts are put into micro-batches: each into one, with others of its kind and about its length."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from headrace.plan.compose import composed

PROMPTS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=40)


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
