"""Skips these tests, with one reason, where there can be no network of our own."""

import pytest
from network import why_not


@pytest.fixture(scope="session", autouse=True)
def namespaces() -> None:
    if (words := why_not()) is not None:
        pytest.skip(words)
