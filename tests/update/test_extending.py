"""The worked example of docs/extending.md is a rule: it keeps the contract."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.testing.rule_contract import LEARNING_RATE, WEIGHT_DECAY, RuleContract
from headrace.update.rules import table

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A module that can be imported, as the page says: numba's cache on disk names the module of what it has inlined, and a
    later process looks for it.
    """
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[0]
    path = tmp_path_factory.mktemp("example") / "plain_sgd.py"
    path.write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        yield vars(importlib.import_module("plain_sgd"))
        del sys.modules["plain_sgd"]


class Plain(torch.optim.Optimizer):
    """As others write it: decay first, then a step of the rate against the gradient."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        super().__init__([parameter], {})
        self.parameter = parameter

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.parameter.grad is not None
        self.parameter.mul_(1 - LEARNING_RATE * WEIGHT_DECAY).sub_(self.parameter.grad, alpha=LEARNING_RATE)


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
