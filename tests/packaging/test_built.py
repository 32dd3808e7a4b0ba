"""The wheel, built from the sdist, is installed in a fresh environment without a compiler, and its command runs there.

What it depends on comes from this environment. Run: pytest tests/packaging
"""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import headrace

ROOT = Path(__file__).parents[2]


def run(*words: object, cwd: Path = Path("/"), **more: str) -> str:
    """Return what a command prints; it runs outside the tree, or it would import the package from there."""
    asked = [str(word) for word in words]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=280, cwd=cwd, env={**os.environ, **more})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.deep
def test_the_wheel_of_the_sdist_runs_where_no_compiler_is(tmp_path: Path) -> None:
    make = "import sys; from hatchling import build; getattr(build, sys.argv[1])(sys.argv[2])"
    run(sys.executable, "-c", make, "build_sdist", tmp_path, cwd=ROOT)
    (source,) = tmp_path.glob("headrace-*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (unpacked,) = (tmp_path / "source").iterdir()
    run(sys.executable, "-c", make, "build_wheel", tmp_path, cwd=unpacked)
    (wheel,) = tmp_path.glob("headrace-*.whl")
    assert wheel.name == f"headrace-{headrace.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert "headrace/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "bench/", "demo/"))]

    place = tmp_path / "fresh"
    run(sys.executable, "-m", "venv", "--without-pip", place)
    site = Path(run(place / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    run(sys.executable, "-m", "pip", "--python", place / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    alone = {"PATH": str(place / "bin"), "PYTHONPATH": "", "CC": "", "HOME": str(tmp_path)}
    code = "import headrace; print(headrace.__file__)"
    assert Path(run(place / "bin" / "python", "-c", code, **alone).strip()).is_relative_to(place)
    command = place / "bin" / "headrace"
    assert run(command, "--version", **alone) == f"headrace {headrace.__version__}\n"
    assert json.loads(run(command, "schema", **alone))["required"] == ["model", "data"]
    assert json.loads(run(command, "doctor", "--no-measure", "--json", **alone))
