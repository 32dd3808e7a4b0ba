"""The worked example of docs/extending.md is a code: three files of a copy of the package, and every command knows it."""

import json
from pathlib import Path

import pytest
from compressing import write_data
from extending import apply, run
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("extended")


@pytest.fixture(scope="module")
def touched(folder: Path) -> set[str]:
    return apply("A code for weights", folder)


@pytest.fixture
def extended(folder: Path, touched: set[str]) -> Path:
    """Return the directory of a copy of the package with the section's edits."""
    return folder


def test_three_files_are_touched(extended: Path, touched: set[str]) -> None:
    assert sorted(Path(name).name for name in touched) == ["coded.py", "int8.py", "table.py"]
    found = run(extended, "-c", "from headrace.codec.table import *; print(code_to_write('to', 'int8').name, len(CODES))")
    assert found.split() == ["int8", "16"]


@pytest.mark.wide
def test_every_command_knows_it(extended: Path, dense: Path, tmp_path: Path) -> None:
    headrace, data = ("-m", "headrace"), write_data(tmp_path / "data.jsonl")
    assert "int8 or int4 or ternary or sparse50 or bf16x12" in " ".join(run(extended, *headrace, "compress", "--help").split())
    asked = ("--to", "int8", "--data", data, "--sequence-length", 48)
    run(extended, *headrace, "compress", dense, tmp_path / "small", *asked)
    assert json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]["quant_method"] == "int8-rows"
    run(extended, *headrace, "decompress", tmp_path / "small", tmp_path / "again")
    again = {key: value for file in (tmp_path / "again").glob("*.safetensors") for key, value in load_file(file).items()}
    for key, weight in load_file(dense / "model.safetensors").items():
        far = (again[key].float() - weight.float()).abs()
        step = weight.float().abs().amax(dim=-1, keepdim=True) / 127
        coded = ".layers." in key and weight.dim() == 2
        assert bool((far <= (4 * step if coded else 0)).all()), key
        assert bool(far.any()) == coded, key
    plans = (*headrace, "plan", "--machine", "rtx4090-1ssd", "--json")
    found = json.loads(run(extended, *plans, dense, "--compress", "int8"))
    assert found["result_bytes"]["int8 matrices"] == pytest.approx(found["coded_parameters"], rel=0.05)
    for words in ((tmp_path / "small",), (dense, "--compress", "int8")):
        plan = json.loads(run(extended, *plans, *words, "--generate", "--prompt-length", 8, "--new-tokens", 4))
        assert plan["placement"]["units"][1]["decodes"][0][0] == "int8"
