"""Models pruned by half: their files, read by other means, are the model that answers are of; who stops a run changes none.

Run: pytest tests/compress/test_sparse_models.py
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressing import files_of, options, run
from safetensors.torch import load_file, save_file
from test_compression import tensors_of
from test_generate_coded import check_against_stock

from headrace.compress.decompression import decompress_model
from headrace.compress.run import compress_model
from headrace.terms.errors import ModelError


@pytest.fixture(scope="module")
def pruned(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("pruned")
    return folder, run(dense, folder, to="sparse50")


def by_hand(parts: dict[str, torch.Tensor], stem: str) -> torch.Tensor:
    rows, columns = parts[f"{stem}_shape"].tolist()
    numbers, out = iter(parts[f"{stem}_values"].tolist()), torch.zeros(rows, columns)
    for row in range(rows):
        for column in range(columns):
            if int(parts[f"{stem}_bitmap"][row, column // 8]) >> column % 8 & 1:
                out[row, column] = next(numbers)
    return out.bfloat16()


@pytest.mark.wide
def test_half_of_each_matrix_is_zero_and_comes_back_as_ordinary_weights(pruned: Any, dense: Path, tmp_path: Path) -> None:
    folder, found = pruned
    before, after = tensors_of(dense), tensors_of(decompress_model(folder / "out", tmp_path / "plain"))
    assert before.keys() == after.keys()
    coded = {}
    for path in (folder / "out").glob("*.safetensors"):
        parts = load_file(path)
        for name in parts:
            if name.endswith("_bitmap"):
                stem = name.removesuffix("_bitmap")
                coded[stem] = by_hand(parts, stem)
    assert len(coded) == 3 * 7
    for name, tensor in after.items():
        assert torch.equal(tensor, coded.get(name, before[name])), name
    assert all((tensor == 0).sum() >= tensor.numel() // 2 for tensor in coded.values())
    assert all(report.error < report.rounding_error for report in found.reports), "errors are made up for"
    assert [report.zeros for report in found.reports] == pytest.approx([0.5] * len(found.reports), abs=0.01)


@pytest.mark.wide
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_those_of_stock_transformers_with_the_decompressed_model(dtype: str, pruned: Any, tmp_path: Path) -> None:
    decompress_model(pruned[0] / "out", tmp_path / "plain")
    check_against_stock(pruned[0] / "out", tmp_path / "plain", dtype)


def test_what_is_damaged_is_refused(pruned: Any, tmp_path: Path) -> None:
    shutil.copytree(pruned[0] / "out", tmp_path / "out")
    path = sorted((tmp_path / "out").glob("*.safetensors"))[1]
    parts = load_file(path)
    name = next(name for name in parts if name.endswith("_bitmap"))
    parts[name][0, 0] ^= 1
    save_file(parts, path, {"format": "pt"})
    with pytest.raises(ModelError, match="is not the file that was written"):
        decompress_model(tmp_path / "out", tmp_path / "plain")


class Stopped(Exception):
    """Ends a process."""


def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(pruned: Any, dense: Path, tmp_path: Path) -> None:
    def stop(text: str) -> None:
        if text.startswith("block 2"):
            raise Stopped

    with pytest.raises(Stopped):
        compress_model(options(dense, tmp_path, to="sparse50"), say=stop)
    said: list[str] = []
    compress_model(options(dense, tmp_path, to="sparse50"), say=said.append)
    assert any(line.startswith("going on after block") for line in said)
    assert files_of(tmp_path) == files_of(pruned[0])
