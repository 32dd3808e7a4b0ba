"""Samples of packed rows in groups: each position once, and no group larger than the micro-batch."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model.blocks.sample_groups import sample_groups_of


def positions_of(rows: list[list[int]]) -> torch.Tensor:
    """Return positions that begin again at each sample; what is left of a row is one more."""
    longest = max(sum(lengths) for lengths in rows)
    filled = [[*lengths, longest - sum(lengths)] for lengths in rows]
    return torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in filled])


@given(rows=st.lists(st.lists(st.integers(1, 700), min_size=1, max_size=9), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_each_position_is_in_one_group_once(rows: list[list[int]]) -> None:
    positions = positions_of(rows)
    tokens = torch.arange(positions.numel()).reshape(positions.shape)
    groups = sample_groups_of(positions)
    assert bool(groups) == bool((positions[:, 1:] == 0).any())
    found = torch.full((positions.numel(),), -1)
    for group in groups:
        of_group = group.rows_of(tokens)
        assert torch.equal(group.rows_of(positions)[:, 0], torch.zeros(len(of_group), dtype=torch.int64))  # samples begin a row
        steps = torch.where(group.real[:, 1:], 1, 0)
        assert torch.equal(of_group[:, 1:] - of_group[:, :-1], steps)  # then come their tokens, and the last one again
        assert len(of_group) == 1 or of_group.numel() <= positions.numel()
        assert len(of_group) * min(256, positions.shape[1]) <= positions.numel()  # whole chunks
        assert (found[of_group[group.real]] == -1).all()
        group.put(of_group, found)
        ones = group.gradients_of(torch.ones(positions.numel(), 3))
        assert torch.equal(ones, group.real[..., None].float().expand(-1, -1, 3))
    assert not groups or torch.equal(found, tokens.flatten())


def test_samples_of_about_one_length_share_a_group() -> None:
    groups = sample_groups_of(positions_of([[400, 390, 380, 100, 90, 20, 20, 20, 2]] * 4))
    assert [tuple(group.places.shape) for group in groups] == [(12, 400), (8, 100), (16, 20)]
    # One row of them has no room for as many chunks.
    groups = sample_groups_of(positions_of([[400, 390, 380, 100, 90, 20, 20, 20, 2]]))
    assert [tuple(group.places.shape) for group in groups] == [(3, 400), (2, 100), (4, 20)]
    groups = sample_groups_of(positions_of([[100, 90, 20, 20, 20, 2]]))
    assert [tuple(group.places.shape) for group in groups] == [(1, 100), (1, 90), (1, 20), (1, 20), (1, 20), (1, 2)]
