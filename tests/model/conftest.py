"""Every architecture under test, as a fixture."""

from typing import Any

import pytest
from tiny_architectures import CONFIGS


@pytest.fixture(params=list(CONFIGS))
def case(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return CONFIGS[request.param]
