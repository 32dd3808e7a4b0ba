"""Files of other trainers, written for these tests with the keys that public examples use."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    """Return what writes a text into a file of a name."""

    def write(text: str, name: str = "theirs.yml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write
