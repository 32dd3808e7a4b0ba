"""A tiny model, and servers of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Serve, Server, serving
from talking_model import save_talking_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a byte-level tokenizer and a chat template."""
    return save_talking_model(tmp_path_factory.mktemp("served") / "tiny", positions=256)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    """A server of three seats for eight requests of up to 128 tokens."""
    with serving(model) as found:
        yield found


@pytest.fixture
def serve_it(model: Path) -> Serve:
    """Return what serves the model with other options."""
    return lambda **options: serving(model, **options)
