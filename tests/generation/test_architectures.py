"""Generation block by block gives the bits of transformers' own `generate`, architecture by architecture."""

import pytest
from tiers import sampled
from tiny_architectures import CONFIGS, make_config

from headrace.model.seats.generation_check import check_generation


@pytest.mark.parametrize(
    "name", sampled(CONFIGS, ("llama-tied", "gemma3", "qwen3-moe", "granite-hybrid", "recurrent-gemma", "dynamic-rope"))
)
def test_an_architecture_generates_as_its_own_loop_does(name: str) -> None:
    check_generation(make_config(CONFIGS[name]))
