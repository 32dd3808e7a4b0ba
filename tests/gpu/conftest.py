"""Skips these tests, with one reason, where there is no GPU; fixtures for those that compare bits."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from gpu_world import save_model
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
# Read by cuBLAS when it is first used; without it two runs of one product may differ in the last bit.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    """Return the GPU; without one the test is skipped."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda:0")


@pytest.fixture
def same_bits() -> Iterator[None]:
    """Attention's backward sums in whatever order threads come, unless told otherwise."""
    torch.use_deterministic_algorithms(True)  # told to warn only, attention goes on as before
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes (once) the directory of a model by name and dtype."""
    made: dict[tuple[str, str], Path] = {}

    def make(name: str, dtype: str = "float32") -> Path:
        if (name, dtype) not in made:
            made[name, dtype] = save_model(tmp_path_factory.mktemp(f"{name}-{dtype}"), name, dtype)
        return made[name, dtype]

    return make
