"""What cannot be compressed is refused in words, and nothing is left behind."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressing import options, run
from safetensors.torch import load_file, save_file

from headrace.compress.run import compress_model
from headrace.terms.errors import ConfigError, DataError, HeadraceError, ModelError, RunDirectoryError


def refused(model: Path, folder: Path, error: type[HeadraceError], words: str, **more: Any) -> None:
    with pytest.raises(error, match=words):
        compress_model(options(model, folder, **more))
    assert not [path.name for path in folder.iterdir() if path.name.startswith(("out", ".out"))]


def test_a_model_that_is_coded_already(dense_int4: Any, tmp_path: Path) -> None:
    refused(dense_int4[0] / "out", tmp_path, ModelError, r"coded already \(compressed-tensors\).*decompress")


def test_calibration_that_is_too_short(dense: Path, tmp_path: Path) -> None:
    refused(dense, tmp_path, DataError, "too short: .* tokens in 1 rows .* A matrix has 96 inputs", calibration_rows=1)


def test_one_row_of_data(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "water"}) + "\n")
    refused(dense, tmp_path, DataError, "one must calibrate and one measure", data=str(tmp_path / "one.jsonl"))


def test_activations_that_overflow(dense: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(dense, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.mlp.gate_proj.weight"] *= 1e20
    weights["model.layers.1.mlp.up_proj.weight"] *= 1e20
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    refused(broken, tmp_path, ModelError, r"layers\.1\.mlp\.down_proj.*not finite")


def test_a_loss_that_rises_too_much(dense: Path, tmp_path: Path) -> None:
    refused(dense, tmp_path, ConfigError, "held-out loss rose by .* allowed is 1e-09; nothing was written", most_loss=1e-9)


def test_a_code_that_fits_nothing(dense: Path, tmp_path: Path) -> None:
    refused(dense, tmp_path, ModelError, "none of its matrices can be coded", experts_only=True)


def test_an_output_that_is_there(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "note").write_text("mine")
    with pytest.raises(RunDirectoryError, match="exists already"):
        run(dense, tmp_path)
    assert (tmp_path / "out" / "note").read_text() == "mine"


def test_weights_that_are_not_finite(dense: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(dense, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][3, 3] = torch.nan
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    refused(broken, tmp_path, ModelError, "NaN or infinity in 1 of")


def test_the_command_line_says_it_in_one_line(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from headrace.cli.app import main

    words = ["compress", str(dense), str(tmp_path / "out"), "--to", "int5", "--data", str(tmp_path / "none.jsonl")]
    for to, expected in (("int5", "to: expected int4 or ternary or sparse50 or bf16x12, found 'int5'"), ("int4", "none.jsonl")):
        words[4] = to
        with pytest.raises(SystemExit) as exit_:
            main(words)
        said = capsys.readouterr().err
        assert exit_.value.code == 2
        assert expected in said
        assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())
