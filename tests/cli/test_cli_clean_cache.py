"""`headrace clean --cache`: what is kept outside runs goes, runs and models stay, and what runs need goes on request alone.

Run: pytest tests/cli/test_cli_clean_cache.py
"""

import fcntl
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import pytest
from bad_worlds import World, listing
from numba.misc import appdirs

import headrace
from headrace.cli import main
from headrace.machine.jit import machine_code_files
from headrace.process import cache_directory, machine_profile_path
from headrace.store.copied_files import WeightFiles
from headrace.store.lock import RunLock
from headrace.store.weight_copy import WeightCopy
from headrace.terms.sizes import format_bytes

LOOP = "from headrace.machine.jit import compiled\n\n\n@compiled\ndef twice(number):\n    return 2 * number\n"


def clean(world: World, *words: object, code: int = 0) -> str:
    assert world.capsys is not None
    world.capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["clean", *map(str, words)])
    said = world.capsys.readouterr()
    assert (left.value.code or 0) == code, said.err
    return said.out + said.err


def loop_in(package: Path) -> ModuleType:
    """Make a package of one module with a loop, and import that."""
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "loops.py").write_text(LOOP)
    spec = importlib.util.spec_from_file_location("loops", package / "loops.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def kept(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world that has trained a run into a cache of its own, with a file of everything else that is kept."""
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(world.folder / name))
    with pytest.raises(SystemExit) as left:
        main(world.train_words("--keep-state"))
    assert not left.value.code
    package = world.folder / "package"
    assert loop_in(package).twice(2) == 4
    monkeypatch.setattr(headrace, "__file__", str(package / "__init__.py"))
    cache = cache_directory()
    for name in ("machines/0123.json", "hub/owner___name/rows.arrow", "gguf/model-01/config.json", "references/01.bin"):
        (cache / name).parent.mkdir(parents=True)
        (cache / name).write_text("x" * 1000)
    machine_profile_path().parent.mkdir(parents=True)
    machine_profile_path().write_text("{}")
    (cache / "notes.txt").write_text("mine")
    return world


def copied(world: World) -> WeightCopy:
    copy = WeightCopy(WeightFiles.of(sorted(world.model.glob("*.safetensors"))), [world.ssd], piece_bytes=1 << 20)
    copy.make([1], lambda event: None)
    assert copy.is_whole
    return copy


def test_caches_go_and_runs_models_and_what_runs_need_stay(kept: World) -> None:
    copy, cache = copied(kept), cache_directory()
    before = listing(kept.folder)
    told = clean(kept, kept.ssd, "--cache", "--dry-run")
    assert listing(kept.folder) == before
    assert told.count("would remove") == 6
    said = clean(kept, kept.ssd, "--cache")
    assert said == told.replace("would remove", "removed ").replace("would be freed", "freed").replace("would be ", "")
    gone = {Path(name) for name in set(before) - set(listing(kept.folder))}
    allowed = ("XDG_CACHE_HOME/headrace/", "XDG_CONFIG_HOME/headrace/machine.json", f"ssd/{copy.folders[0].name}", "package/")
    assert [path for path in gone if not str(path).startswith(allowed)] == []
    assert sorted(path.name for path in cache.iterdir()) == ["gguf", "notes.txt", "references"]
    assert machine_code_files(kept.folder / "package") == []
    assert (kept.folder / "package" / "loops.py").exists()
    assert not machine_profile_path().exists()
    assert not copy.is_whole
    assert "runs of preferences that are not finished need them (--unfinished removes them)" in said
    said = clean(kept, "--cache", "--unfinished")
    assert "log-probabilities of references" in said
    assert sorted(path.name for path in cache.iterdir()) == ["notes.txt"]
    assert clean(kept, "--cache") == "0 B freed of what is kept outside runs and models\n"


def test_bytes_are_those_of_the_files(kept: World) -> None:
    sizes = {path: path.stat().st_size for path in cache_directory().rglob("*") if path.is_file()}
    tokens = sum(size for path, size in sizes.items() if "/tokens-" in str(path))
    told = clean(kept, "--cache", "--dry-run")
    assert tokens > 100
    assert f"would remove tokenised data in {cache_directory()} (1, {format_bytes(tokens)})" in told
    assert "data sets of the Hub" in told
    assert "(1, 1000 B)" in told


def test_what_a_process_works_on_stays(kept: World) -> None:
    cache, copy = cache_directory(), copied(kept)
    (tokens,) = cache.glob("tokens-*[!k]")
    lock = RunLock(copy.folders[0])
    with tokens.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        said = clean(kept, kept.ssd, "--cache")
    lock.release()
    assert "a process works on it; clean when it is done" in said
    assert tokens.is_dir()
    assert copy.is_whole
    assert list((cache / "machines").glob("*")) == []


def test_a_link_goes_and_what_it_leads_to_stays(kept: World) -> None:
    elsewhere = kept.folder / "elsewhere"
    (cache_directory() / "hub").rename(elsewhere)
    (cache_directory() / "hub").symlink_to(elsewhere)
    clean(kept, "--cache")
    assert not (cache_directory() / "hub").is_symlink()
    assert (elsewhere / "owner___name" / "rows.arrow").exists()


def test_what_cannot_be_removed_is_said_and_keeps_nothing_else(kept: World, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = Path.unlink

    def refusing(path: Path, missing_ok: bool = False) -> None:
        if path == machine_profile_path():
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refusing)
    said = clean(kept, "--cache", code=2)
    assert f"{machine_profile_path()}: cannot be removed: Permission denied" in said
    assert not list(cache_directory().glob("tokens-*"))


def test_nothing_to_clean_is_said(world: World) -> None:
    assert "name SSD or run directories, or give --cache" in world.refused("clean")


@pytest.mark.parametrize("where", ["beside", "user", "given"])
def test_machine_code_is_found_wherever_numba_keeps_it(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if where == "given":
        monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "given"))
    if where == "user":  # as in an installation that cannot be written
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
        locator: Any = numba.core.caching.CacheImpl._locator_classes
        monkeypatch.setattr(
            numba.core.caching.CacheImpl, "_locator_classes", [each for each in locator if "Tree" not in str(each)]
        )
        assert appdirs.AppDirs(appname="numba", appauthor=False).user_cache_dir.startswith(str(tmp_path))
    assert loop_in(tmp_path / "package").twice(2) == 4
    written = sorted(path for path in tmp_path.rglob("*.nb?"))
    assert len(written) == 2
    assert sorted(machine_code_files(tmp_path / "package")) == written
