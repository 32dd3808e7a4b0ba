"""The worked example of docs/extending.md is a code: three files of a copy of the package, and every command knows it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from compressing import write_data
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```python\n# ([\w/]+\.py), (new in|in|above) ([\w/]+)\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a copy of the package with the page's edits."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / "headrace", folder / "headrace", ignore=shutil.ignore_patterns("__pycache__"))
    for name, how, place, text in BLOCK.findall((ROOT / "docs" / "extending.md").read_text(encoding="utf-8")):
        path = folder / name
        if how == "new in":
            (folder / place / name).write_text(text, encoding="utf-8")
            continue
        before, line, after = re.split(rf"(^{place}\b.*\n)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        joined = (line, text) if how == "in" else (text, "\n\n", line)
        path.write_text(before + "".join(joined) + after, encoding="utf-8")
    return folder


def run(extended: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run Python on the copy."""
    env = os.environ | {"PYTHONPATH": str(extended), "HOME": str(extended)}  # caches of data lie at home
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=extended, env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def test_three_files_are_touched(extended: Path) -> None:
    there = {path.relative_to(ROOT): path for path in (ROOT / "headrace").rglob("*.py")}
    ours = {path.relative_to(extended): path for path in (extended / "headrace").rglob("*.py")}
    changed = {str(name) for name, path in ours.items() if name not in there or there[name].read_bytes() != path.read_bytes()}
    assert sorted(name.rpartition("/")[2] for name in changed) == ["coded.py", "int8.py", "table.py"]
    found = run(extended, "-c", "from headrace.codec.table import *; print(code_to_write('to', 'int8').name, len(CODES))")
    assert found.stdout.split() == ["int8", "7"]


@pytest.mark.deep
def test_every_command_knows_it(extended: Path, dense: Path, tmp_path: Path) -> None:
    headrace, data = ("-m", "headrace"), write_data(tmp_path / "data.jsonl")
    assert "int8 or int4 or ternary" in " ".join(run(extended, *headrace, "compress", "--help").stdout.split())
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
    found = json.loads(run(extended, *plans, dense, "--compress", "int8").stdout)
    assert found["result_bytes"]["int8 matrices"] == pytest.approx(found["coded_parameters"], rel=0.05)
    for words in ((tmp_path / "small",), (dense, "--compress", "int8")):
        plan = json.loads(run(extended, *plans, *words, "--generate", "--prompt-length", 8, "--new-tokens", 4).stdout)
        assert plan["units"][1]["decodes"][0][0] == "int8"
