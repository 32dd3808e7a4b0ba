"""Triton's kernels without a GPU: by its interpreter, bit for bit as the host decodes; and made into machine code."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import kernel_cases
import pytest
import torch

from headrace.codec import on_device


def by_itself(words: str, folder: Path, **environment: str) -> str:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no Triton here (pip install triton, or a CUDA build of torch)")
    command = [sys.executable, str(Path(kernel_cases.__file__)), *words.split()]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    known = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(folder), **environment}
    done = subprocess.run(command, env=known, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.wide
def test_interpreted_they_do_what_the_host_does(tmp_path: Path) -> None:
    said = by_itself("interpret", tmp_path, TRITON_INTERPRET="1")
    assert said.split() == [case.__name__ for case in kernel_cases.CASES]


@pytest.mark.deep
def test_products_of_drawn_shapes(tmp_path: Path) -> None:
    by_itself("drawn", tmp_path, TRITON_INTERPRET="1")


@pytest.mark.parametrize("architectures", ["86", pytest.param("80 89 90 120", marks=pytest.mark.deep)])
@pytest.mark.wide
def test_they_compile_without_spills(architectures: str, tmp_path: Path) -> None:
    said = by_itself(f"compile {architectures}", tmp_path, TRITON_INTERPRET="0")
    assert [line.split()[0] for line in said.splitlines()] == architectures.split()


def test_the_host_has_no_use_for_them() -> None:
    assert on_device.triton_kernels(torch.device("cpu")) is None
