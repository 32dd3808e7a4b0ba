"""A merge is a step of PyTorch's SGD along the weighted mean of displacements, and its change is rounded to bfloat16."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiers import sampled

from headrace.peers.local_steps.number_file import NumberFile
from headrace.peers.local_steps.outer import Change, Merge, OuterState
from headrace.terms.errors import CorruptData, PeerLost
from headrace.update.sites.travel import TRAVELS

TRAVEL = TRAVELS["bfloat16"]

CASES = [
    ("sgd:momentum=0.9,nesterov=true", 0.7, {"momentum": 0.9, "nesterov": True}, {}),
    ("sgd:momentum=0", 1.0, {}, {}),
    ("sgd:momentum=0.9,nesterov=true", 0.7, {"momentum": 0.9, "nesterov": True}, {"adapter": "lora:rank=4"}),
    ("sgd:momentum=0.5", 0.7, {"momentum": 0.5}, {"train": "matrices"}),
]


def pushed(folder: Path, name: str, counts: tuple[int, ...], seed: int) -> NumberFile:
    file, dice = NumberFile(folder / name, TRAVEL.sizes(counts), TRAVEL.dtype), torch.Generator().manual_seed(seed)
    file.write(TRAVEL.encode(torch.randn(count, generator=dice) * 0.01) for count in counts)
    return file


def numbers(state: OuterState) -> list[torch.Tensor]:
    return [state.masters.read(unit) for unit in range(len(state.masters.counts))]


@pytest.mark.parametrize(("rule", "rate", "reference", "method"), sampled(CASES, [CASES[0]]))
def test_merges_are_steps_of_pytorch(
    rule: str, rate: float, reference: dict[str, Any], method: dict[str, Any], tmp_path: Path, begun: Callable[..., OuterState]
) -> None:
    with begun(tmp_path / "run", outer=rule, outer_learning_rate=rate, **method) as state:
        counts = state.masters.counts
        expected = [torch.nn.Parameter(unit) for unit in numbers(state)]
        sgd = torch.optim.SGD(expected, lr=rate, **reference)
        for number in (1, 2, 3):
            pushes = [pushed(tmp_path, f"{number}-{learner}", counts, 10 * number + learner) for learner in range(3)]
            weights = [500.0, 400.0, 100.0]
            change = NumberFile(tmp_path / f"change-{number}", counts, TRAVEL.dtype)
            before = numbers(state)
            state.merge(Merge(pushes, weights, TRAVEL), number, Change(change))
            state.commit({})
            now = numbers(state)
            for unit, parameter in enumerate(expected):
                parameter.grad = sum(
                    weight / 1000 * TRAVEL.decode(push.read(unit), parameter.numel())
                    for weight, push in zip(weights, pushes, strict=True)
                )
                assert torch.equal(before[unit] + TRAVEL.decode(change.read(unit), parameter.numel()), now[unit]), (
                    "a learner has the same bits"
                )
            sgd.step()
            for unit, parameter in enumerate(expected):
                moved = (parameter.detach() - before[unit]).abs()
                wrong = (parameter.detach() - now[unit]).abs()
                assert (wrong <= moved * 2**-8 + 1e-6).all(), "one rounding to bfloat16 in each merge"
                with torch.no_grad():
                    parameter.copy_(now[unit])


def test_a_file_of_numbers_is_whole_or_absent_and_damage_is_noticed(tmp_path: Path) -> None:
    file = NumberFile(tmp_path / "numbers", (3, 0, 5))
    units = [np.arange(count, dtype=np.float32) for count in file.counts]

    def broken() -> Any:
        yield units[0]
        raise PeerLost

    with pytest.raises(PeerLost):
        file.write(broken())
    assert list(tmp_path.iterdir()) == []
    file.write(units, {"loss": 2.5})
    assert file.notes == {"loss": 2.5}
    assert [file.read(unit).tolist() for unit in range(3)] == [[0, 1, 2], [], [0, 1, 2, 3, 4]]
    content = bytearray(file.path.read_bytes())
    content[13] ^= 1
    file.path.write_bytes(content)
    assert NumberFile(file.path, file.counts).read(0).tolist() == [0, 1, 2]
    with pytest.raises(CorruptData, match="unit 2"):
        NumberFile(file.path, file.counts).read(2)
    notes = content.index(b'"sums"')
    file.path.write_bytes(content[:notes] + b"\0" + content[notes + 1 :])
    with pytest.raises(CorruptData, match="no note"):
        NumberFile(file.path, file.counts).read(0)
    file.path.write_bytes(content[:-1])
    with pytest.raises(CorruptData):
        NumberFile(file.path, file.counts).read(0)
