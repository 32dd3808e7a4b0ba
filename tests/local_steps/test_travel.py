"""Numbers that travel: each within half a step of what was sent, and what rounding left arrives with the next."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace.peers.local_steps.number_file import NumberFile
from headrace.peers.local_steps.outer import Change, Merge, OuterState
from headrace.update.sites.travel import TRAVELS

INT8 = TRAVELS["int8"]


@pytest.mark.parametrize("count", [1, 511, 512, 4000])
def test_eight_bits_are_within_half_a_step_of_their_block(count: int) -> None:
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 1e-3
    values = INT8.encode(numbers)
    assert (values.size,) == INT8.sizes([count])
    assert values.size <= 1.02 * count or count < 511
    for start in range(0, count, 512):
        block, found = numbers[start : start + 512], INT8.decode(values, count)[start : start + 512]
        step = float(block.abs().max()) / 127
        assert float((found - block).abs().max()) <= 0.5001 * step
    assert not INT8.decode(INT8.encode(torch.zeros(count)), count).any()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", TRAVELS)
def test_numbers_that_are_not_finite_arrive_so(name: str, number: float) -> None:
    travel, numbers = TRAVELS[name], torch.zeros(600)
    numbers[7] = number
    assert not torch.isfinite(travel.decode(travel.encode(numbers), 600)).all()


def test_what_rounding_leaves_of_a_merge_is_in_the_next_one(tmp_path: Path, begun: Callable[..., OuterState]) -> None:
    """After many merges the weights are where exact sums would be, to the roundings of the last merge alone."""
    with begun(tmp_path / "run", outer="sgd:momentum=0", outer_learning_rate=1.0) as state:
        counts = state.masters.counts
        exact = [state.masters.read(unit).double() for unit in range(len(counts))]
        error = None
        for number in range(1, 9):
            dice = torch.Generator().manual_seed(number)
            moves = [torch.randn(count, generator=dice) * 1e-2 for count in counts]
            push = NumberFile(tmp_path / f"push-{number}", INT8.sizes(counts), INT8.dtype)
            push.write(INT8.encode(each) for each in moves)
            change = NumberFile(tmp_path / f"change-{number}", INT8.sizes(counts), INT8.dtype)
            new_error = NumberFile(tmp_path / f"error-{number}", counts)
            state.merge(Merge([push], [1.0], INT8), number, Change(change, error, new_error))
            state.commit({})
            error = new_error
            for unit, count in enumerate(counts):
                exact[unit] -= INT8.decode(push.read(unit), count).double()
        for unit, count in enumerate(counts):
            now, left = state.masters.read(unit).double(), torch.from_numpy(error.read(unit)).double()
            assert float((now + left - exact[unit]).abs().max()) < 1e-6
            assert float(left.abs().max()) <= 0.51 * float(INT8.decode(change.read(unit), count).abs().max()) / 100
