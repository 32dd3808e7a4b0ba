"""Models that several tests compress, and one that is compressed."""

from pathlib import Path

import pytest
import torch
from compressing import run, write_model

from headrace.compress.run import Compressed


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mixture"), "mixtral", torch.float32)


@pytest.fixture(scope="session")
def dense_int4(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Compressed]:
    folder = tmp_path_factory.mktemp("dense-int4")
    return folder, run(dense, folder)


@pytest.fixture(scope="session")
def mixture_int4(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Compressed]:
    folder = tmp_path_factory.mktemp("mixture-int4")
    return folder, run(mixture, folder, group_size=64)
