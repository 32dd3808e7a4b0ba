"""A plan that was searched for gives the bits of the first that fits: most tests of this folder get that one (conftest.py)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import MODELS, SPLIT, train
from tiers import sampled


@pytest.mark.wide
@pytest.mark.searched
@pytest.mark.parametrize("name", sampled(MODELS, ("llama", "gpt2-dropout", "mamba2", "mixtral-aux")))
def test_a_searched_plan_gives_the_bits_of_the_first_that_fits(
    name: str, plans: Any, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    losses, weights = train(model_dir(name), tmp_path / "searched", steps=1, adjust=SPLIT)
    plans.searches = False
    first = train(model_dir(name), tmp_path / "first", steps=1, adjust=SPLIT)
    assert first[0] == losses
    for key, want in weights.items():
        assert torch.equal(first[1][key], want), key
