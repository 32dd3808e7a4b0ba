"""A loss takes few positions at a time where memory is short, but all where that spares more than it takes."""

from dataclasses import fields
from typing import Any

import pytest
from small_plans import small_plan

from headrace.plan.value.loss_chunks import loss_chunk_tokens, spared_sums
from headrace.plan.value.workload import Workload
from headrace.terms.costs import ModelCosts

MIB = 1 << 20
# Bytes of logits for so many positions: all 512 take 16 MiB more than a lean plan allows anyway.
SAMPLES = ((128, 50 * MIB), (256, 70 * MIB), (512, 90 * MIB))


def costs_of(**more: Any) -> ModelCosts:
    values: dict[str, Any] = dict.fromkeys((each.name for each in fields(ModelCosts)), 0)
    values |= {"sequences": 1, "blocks": (), "epilogue_workspace_bytes": SAMPLES, "kept_logit_tokens": 512}
    return ModelCosts(**values | more)


@pytest.mark.parametrize(
    ("lean", "spared", "more", "expected"),
    [
        (False, 0, {}, 512),
        (True, 0, {}, 256),
        (True, 15 * MIB, {}, 256),
        (True, 17 * MIB, {}, 512),
        (True, 17 * MIB, {"kept_logit_tokens": 0}, 256),  # without ranges logits of all positions are made
        (True, 17 * MIB, {"sequences": 2}, 256),  # nothing was measured for so many
    ],
)
def test_all_positions_are_taken_where_that_spares_more_than_it_takes(
    lean: bool, spared: int, more: dict[str, Any], expected: int
) -> None:
    workload = Workload(sequence_length=512, tokens_per_step=1024, clip=False)
    assert loss_chunk_tokens(costs_of(**more), workload, lean, spared) == expected


def test_what_is_spared_are_float32_sums_of_the_ends() -> None:
    units = small_plan(3).units
    elements = units[0].gradient_elements
    assert spared_sums(units, costs_of()) == 4 * elements, "they take turns"
    assert spared_sums(units, costs_of(tied=True)) == 8 * elements
