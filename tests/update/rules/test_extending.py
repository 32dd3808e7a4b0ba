"""The worked examples of docs/extending.md are rules: they keep the contract."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.terms.cuts import pieces_of
from headrace.terms.layout import lay_out
from headrace.terms.options.options import Options
from headrace.testing.rule_contract import LEARNING_RATE, WEIGHT_DECAY, RuleContract
from headrace.update import DeviceUpdater, StepScalars, Updater, optimizer_of, rule_of
from headrace.update.rules import table
from headrace.update.rules.rule import Chunk

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A module that can be imported, as the page says: numba's cache on disk names the module of what it has inlined, and a
    later process looks for it.
    """
    plain, by_matrix = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[:2]
    folder = tmp_path_factory.mktemp("example")
    (folder / "plain_sgd.py").write_text(plain)
    (folder / "matrix_sgd.py").write_text(by_matrix)
    names = ("plain_sgd", "matrix_sgd")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield {key: value for name in names for key, value in vars(importlib.import_module(name)).items()}
        for name in names:
            del sys.modules[name]


class Plain(torch.optim.Optimizer):
    """As others write it: decay first, then a step of the rate against the gradient."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        super().__init__([parameter], {})
        self.parameter = parameter

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.parameter.grad is not None
        self.parameter.mul_(1 - LEARNING_RATE * WEIGHT_DECAY).sub_(self.parameter.grad, alpha=LEARNING_RATE)


@pytest.mark.wide
def test_it_keeps_the_contract(example: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Suite(RuleContract):
        optimizer = example["PlainSGD"]()

        def reference(self, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
            return Plain(parameter)

    monkeypatch.setitem(table.RULES, example["PlainSGD"], example["PlainSGDRule"])
    suite = Suite()
    tests = [name for name in dir(suite) if name.startswith("test_")]
    assert len(tests) > 6
    for name in tests:
        getattr(suite, name)()


def test_the_rule_of_whole_matrices_is_one(example: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch would do it with each matrix by itself, a stack's too; on the host and on a device with the same bits."""
    monkeypatch.setitem(table.RULES, example["MatrixSGD"], example["MatrixSGDRule"])
    rule = rule_of(optimizer_of(Options(optimizer="matrix_sgd", learning_rate=LEARNING_RATE)), "float32")
    shapes = {"w": (30, 70), "experts": (3, 20, 40), "norm": (50,)}
    layout = lay_out("block.1", [(n, s, (1.0, 0.1)) for n, s in shapes.items()], rule.figures.parameter_alignment)
    pieces, step = pieces_of(layout, rule.figures), StepScalars(learning_rate=LEARNING_RATE, update=1)
    drawn = torch.randn(2, layout.num_elements, generator=torch.Generator().manual_seed(1))
    (host, gradient), device = drawn.clone(), drawn[0].clone()
    with Updater(rule, 2) as updater:
        updater.update_range(Chunk(host.numpy(), (), gradient.numpy()), step, pieces)
    DeviceUpdater(rule).update_range(Chunk(device, (), gradient), step, pieces)
    assert torch.equal(host, device)
    for each in layout.parameters:
        place = slice(each.offset, each.offset + each.num_elements)
        p, g = (array[place].view(shapes[each.name]) for array in drawn)
        direction = g / g.norm(dim=(-2, -1), keepdim=True) if g.dim() > 1 else g + 0.1 * p
        kept = p * (1 - 0.1 * LEARNING_RATE) if g.dim() > 1 else p
        torch.testing.assert_close(host[place].view(p.shape), kept - LEARNING_RATE * direction)
