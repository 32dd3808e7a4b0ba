"""Every architecture under test, as a fixture."""

from typing import Any

import pytest
from tiers import sampled
from tiny_architectures import CONFIGS

# One of each structure: learned positions and tied weights, two kinds of attention, experts, state-space layers among others.
REPRESENTATIVES = ("gpt2", "gemma3", "qwen3-moe-routed", "nemotron-h")


@pytest.fixture(params=sampled(CONFIGS, REPRESENTATIVES))
def case(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return CONFIGS[request.param]
