"""Nothing is written but in the run directory, on the SSDs, in the cache and in HF_HOME; temporary files are gone at the end.

Python's audit hooks see each file that is opened for writing, made, renamed or removed. What libraries write in other languages
shows in the directories, which are empty at first.

Run: pytest tests/cli/test_where_it_writes.py
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from bad_worlds import World
from forked import PROCESSES

ALLOWED = ("run", "ssd", "cache", "hub", "tmp", "out", "page.html")
MAKES = ("os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.utime")


def _audited(commands: list[list[str]], folder: str, environment: dict[str, str]) -> None:
    """Run commands, and leave the places that they wrote to in `folder`/seen.json."""
    from headrace.cli import main

    os.chdir(Path(folder) / "cwd")
    os.environ.update(environment)
    sys.dont_write_bytecode = True
    tempfile.tempdir = None  # the process that this one was forked from has looked it up
    seen: set[str] = set()

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            places = given[:1]
        elif event in MAKES:
            # A name within an open directory comes with that; whoever opened the directory had its path.
            places = tuple(each for each in given[:2] if isinstance(each, str | bytes | os.PathLike))
            if (
                any(isinstance(each, int) and each not in (-1, 0o777) and each >= 0 for each in given[1:])
                and event != "os.mkdir"
            ):
                places = tuple(each for each in places if os.path.isabs(os.fsdecode(each)))
        else:
            return
        seen.update(os.path.abspath(os.fsdecode(each)) for each in places if isinstance(each, str | bytes | os.PathLike))

    sys.addaudithook(hook)
    for words in commands:
        with pytest.raises(SystemExit) as left:
            main(words)
        assert not left.value.code, words
    places = sorted(seen)
    (Path(folder) / "seen.json").write_text(json.dumps(places))


def is_allowed(place: Path, folder: Path) -> bool:
    """Return whether a place is within an allowed one, or beside it where something is made that appears whole."""
    if not place.is_relative_to(folder):  # compiled loops lie beside the package, as Python's bytecode does
        return place.parts[1] in ("dev", "proc") or "__pycache__" in place.parts
    inside = place.relative_to(folder).parts
    return not inside or inside[0].lstrip(".").startswith(ALLOWED)


@pytest.mark.deep
def test_nothing_is_written_elsewhere(world: World) -> None:
    folder = world.folder
    environment = {"HOME": "home", "TMPDIR": "tmp", "XDG_CACHE_HOME": "cache", "HF_HOME": "hub"}
    for name in ("cwd", *environment.values()):
        (folder / name).mkdir()
    before = {path: path.stat().st_mtime_ns for path in world.model.rglob("*")}
    commands = [
        world.train_words("--report-to", "trace", "--eval-split", "2", "--save-steps", "1"),
        ["generate", str(world.run), "--prompt", "water", "--max-new-tokens", "2"],
        ["eval", str(world.run), "--data", str(world.data), "--rows", "2"],
        ["report", str(world.run), "--out", str(folder / "page.html")],
        ["export", str(world.run), str(folder / "out")],
        ["plan", str(world.model), "--ssd", str(world.ssd)],
    ]
    given = {name: str(folder / value) for name, value in environment.items()}
    process = PROCESSES.Process(target=_audited, args=(commands, str(folder), given))
    process.start()
    process.join(280)
    assert process.exitcode == 0
    seen = [Path(place) for place in json.loads((folder / "seen.json").read_text())]
    assert any(place.is_relative_to(world.ssd) for place in seen)
    assert [place for place in seen if not is_allowed(place, folder)] == []
    assert {path: path.stat().st_mtime_ns for path in world.model.rglob("*")} == before
    assert [path for name in ("cwd", "home", "tmp") for path in (folder / name).rglob("*")] == []
