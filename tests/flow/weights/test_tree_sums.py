"""A tree of gradients: its leaves begin with nothing, whatever lay in their buffers. Run: pytest tests/flow/weights"""

from types import SimpleNamespace
from typing import Any, cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.flow.weights.gradient_sums import TreeSums
from headrace.terms.lanes import Lane
from headrace.terms.layout import lay_out
from headrace.terms.program import Op, Verb

TRAINED = lay_out("blocks.0", [(name, (3,), (1.0, 0.0)) for name in ("a", "b", "c")])
NAMES = [spec.name for spec in TRAINED.parameters]


class DirtyBuffers:
    """A place for each partial sum of a tree, which holds what the last step left there."""

    def __init__(self) -> None:
        self.plan = SimpleNamespace(gradient_slot_of={})
        self.places: dict[int, torch.Tensor] = {}

    def accumulator(self, unit: int, slot: int, place: int) -> torch.Tensor:
        return self.places.setdefault(place, torch.full((TRAINED.num_elements,), 1e30))


def tree(leaves: list[torch.Tensor]) -> torch.Tensor:
    """Add leaves as an aligned binary tree: the largest power of two of them first."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << ((len(leaves) - 1).bit_length() - 1)
    return tree(leaves[:half]) + tree(leaves[half:])


@given(st.lists(st.sets(st.sampled_from(NAMES)), min_size=1, max_size=9), st.integers(0, 2**31))
def test_a_parameter_without_a_gradient_counts_as_zero_in_each_leaf(given_names: list[set[str]], seed: int) -> None:
    random, buffers = torch.Generator().manual_seed(seed), DirtyBuffers()
    plan = SimpleNamespace(tied=False)
    sums = TreeSums(cast(Any, plan), cast(Any, buffers), len(given_names))
    leaves = []
    for micro, names in enumerate(given_names):
        leaf = torch.zeros(TRAINED.num_elements)
        with sums.leaf(Op(micro, Verb.BACKWARD, Lane.COMPUTE, unit=1, micro=micro), 1, TRAINED) as (place, delivered):
            for spec in TRAINED.parameters:
                if spec.name in names:
                    here = slice(spec.offset, spec.offset + spec.num_elements)
                    leaf[here] = torch.randn(spec.num_elements, generator=random)
                    place[here] = leaf[here]
                    delivered.add(spec.name)
        leaves.append(leaf)
    expected = tree(leaves)
    for spec in TRAINED.parameters:
        here = slice(spec.offset, spec.offset + spec.num_elements)
        assert torch.equal(buffers.places[0][here], expected[here])
    assert sums.delivered[1] == set().union(*given_names)
