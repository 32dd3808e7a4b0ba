"""What only newer versions of transformers can do: tests of it are left out with older ones, and say so.

Headrace itself takes them all (pyproject.toml), and refuses what an older one cannot do.
"""

import pytest
import transformers
from packaging.version import Version


def needs_transformers(version: str, why: str) -> pytest.MarkDecorator:
    """Mark a test that would fail with a `transformers` older than `version`."""
    older = Version(transformers.__version__) < Version(version)
    return pytest.mark.skipif(older, reason=f"transformers {transformers.__version__}: before {version}, {why}")


COMPILES_EXPERTS = needs_transformers("5.23", "products of packed experts cannot be compiled on a CPU")
CAUSAL_DOGE = needs_transformers("5.18", "Doge attends to later positions")
LONG_ROPE_IN_A_PLAN = needs_transformers("5.21", "rotary tables for long rows are chosen by a look at the positions")
