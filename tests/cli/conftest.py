"""Worlds for whole commands: a model, data and an SSD directory, and a run that has been there already."""

import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from bad_worlds import World, save_model

from headrace.cli import main
from headrace.store.manifest import MANIFEST_NAME

YAML_DUMP = functools.partial(yaml.safe_dump, sort_keys=False)


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the tokenised data of all worlds goes: it may stay, because its name is made from its content."""
    path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(path))
        yield path


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory to copy."""
    return save_model(tmp_path_factory.mktemp("template") / "model")


@pytest.fixture
def world(tmp_path: Path, template: Path, shared_cache: Path, capsys: pytest.CaptureFixture[str]) -> World:
    """Everything that a run needs, and no run yet."""
    return World(tmp_path / "world", capsys).fill(template)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, template: Path, shared_cache: Path) -> Path:
    """The folder of a world whose run has taken its steps and kept its state."""
    world = World(tmp_path_factory.mktemp("trained") / "world").fill(template)
    with pytest.raises(SystemExit) as left:
        main(world.train_words("--keep-state"))
    assert not left.value.code
    return world.folder


@pytest.fixture
def ran(trained: Path, tmp_path: Path, shared_cache: Path, capsys: pytest.CaptureFixture[str]) -> World:
    """A copy of the trained world. The places in its files are those of the copy; commit records still name the first model."""
    world = World(tmp_path / "world", capsys)
    shutil.copytree(trained, world.folder)
    for path in (world.run / MANIFEST_NAME, world.run / "config.yaml", *world.ssd.glob("*/owner.json")):
        read, write = (json.loads, json.dumps) if path.suffix == ".json" else (yaml.safe_load, YAML_DUMP)
        values = read(path.read_text(encoding="utf-8"))
        path.write_text(write(moved(values, str(trained), str(world.folder))), encoding="utf-8")
    return world


def moved(value: Any, old: str, new: str) -> Any:
    """Return what was read from a file with `new` for `old` in all its texts."""
    if isinstance(value, dict):
        return {key: moved(each, old, new) for key, each in value.items()}
    if isinstance(value, list):
        return [moved(each, old, new) for each in value]
    return value.replace(old, new) if isinstance(value, str) else value
