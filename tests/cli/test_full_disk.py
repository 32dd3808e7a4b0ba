"""A disk that fills up, or a directory that goes away, while a run writes its small files or its model: one line, exit code 2,
the state is safe, and the run can be resumed to the same weights.

Full files are `/dev/full`: the kernel itself refuses what is written there.

Run: pytest tests/cli/test_full_disk.py
"""

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from bad_worlds import World, check_refusal
from tiers import sampled

from headrace.cli import main
from headrace.model import Checkpoint, export_bytes
from headrace.report import read_metrics
from headrace.runs import loop
from headrace.store.manifest import MANIFEST_NAME, RECORD_NAMES
from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import StorageError
from headrace.terms.sizes import format_bytes

NOTES = ("README.md", "headrace.json")
NO_SPACE = os.strerror(errno.ENOSPC)
pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")


def exit_code(*words: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return int(left.value.code or 0)


def refused(world: World, *words: object) -> str:
    """Run the command; return the one line that it left on stderr."""
    assert world.capsys is not None
    world.capsys.readouterr()
    code = exit_code(*words)
    said = world.capsys.readouterr().err
    check_refusal(code, said)
    return said


def weights(directory: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}
    assert found
    return found


@pytest.fixture(scope="module")
def unbroken(trained: Path) -> dict[str, bytes]:
    """The weights that an undisturbed run ends with."""
    return weights(trained / "run" / "final")


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function after which files of these names cannot be written."""
    really = Path.open

    def fill(*names: str) -> None:
        def opened(self: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
            if any(fnmatch(self.name, name) for name in names) and mode[0] in "wax":
                return open("/dev/full", mode.replace("x", "w"), *rest, **options)
            return really(self, mode, *rest, **options)

        monkeypatch.setattr(Path, "open", opened)

    return fill


FILES = [
    ["metrics.jsonl"],
    ["lanes.jsonl", "timeline.json.new", "trace.json"],
    ["events.out.*"],
    ["trainer_state.json.new"],
    ["plan.json.new"],
    ["summary.json.new"],
]


@pytest.mark.parametrize("names", sampled(FILES, FILES[:4]), ids=" ".join)
def test_in_mid_run_the_state_is_safe(
    world: World, unbroken: dict[str, bytes], fill: Callable[..., None], monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    reports = ["trace"]
    if names == ["events.out.*"]:
        pytest.importorskip("tensorboard")
        reports.append("tensorboard")
    words = [*world.train_words(), *(word for report in reports for word in ("--report-to", report))]
    fill(*names)
    said = refused(world, *words)
    monkeypatch.undo()
    assert str(world.run) in said
    assert NO_SPACE in said
    assert "the last committed step is safe: free some space, then resume with: headrace resume" in said
    assert not (world.run / "final").exists()
    assert exit_code("resume", world.run) == 0
    assert weights(world.run / "final") == unbroken
    steps = [record["step"] for record in read_metrics(world.run / "metrics.jsonl")]
    assert steps == sorted(set(steps))
    assert json.loads((world.run / "trainer_state.json").read_text())["max_steps"] == 2


def test_the_options_of_a_run_have_no_space_before_it_begins(world: World, fill: Callable[..., None]) -> None:
    fill("config.yaml.*.new")
    said = refused(world, *world.train_words())
    assert f"output: {world.run} cannot be written ({NO_SPACE})" in said
    assert not world.run.exists()


@pytest.mark.parametrize("short_bytes", [1000, -200_000], ids=["model", "model and state together"])
def test_the_model_of_a_run_has_no_space_before_it_begins(
    world: World, monkeypatch: pytest.MonkeyPatch, short_bytes: int
) -> None:
    """Told before the first step, not after the last. The state takes more than a megabyte."""
    free_bytes = export_bytes(Checkpoint.open(world.model)) - short_bytes
    usage = shutil.disk_usage(world.folder)._replace(free=free_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    said = world.train_refused()
    assert f"{world.run / 'final'}: the finished model needs " in said
    assert "there, and the state 1." in said
    assert f"; free are {format_bytes(free_bytes)}; free some space, or name another output or ssd" in said


def test_the_model_takes_what_was_said(world: World) -> None:
    assert exit_code(*world.train_words()) == 0
    written = sum(path.stat().st_size for path in (world.run / "final").rglob("*") if path.name not in NOTES)
    assert abs(written - export_bytes(Checkpoint.open(world.model))) < 100


def test_the_state_of_a_run_has_no_space_before_it_begins(world: World, fill: Callable[..., None]) -> None:
    fill("state.json.new*")
    said = refused(world, *world.train_words())
    assert f"{world.run / 'state.json.new'}: cannot be written ({NO_SPACE}); free some space" in said
    assert not world.run.exists()
    assert list(world.ssd.iterdir()) == []


def test_a_run_directory_that_goes_away(world: World, unbroken: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Moved here, as an unmounted drive would be: its files that are open stay so, no others can be made."""
    away = world.folder / "away"
    really = loop.step_tensors_of

    def move(batch: Any) -> Any:
        if world.run.exists():
            world.run.rename(away)
        return really(batch)

    monkeypatch.setattr(loop, "step_tensors_of", move)
    said = refused(world, *world.train_words())
    monkeypatch.undo()
    assert os.strerror(errno.ENOENT) in said
    assert f"remove the cause, then resume with: headrace resume {world.run}" in said
    away.rename(world.run)
    assert exit_code("resume", world.run) == 0
    assert weights(world.run / "final") == unbroken


@pytest.fixture
def full_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of weights can be written."""
    really = os.write

    def write(descriptor: int, data: Any) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors"):
            raise OSError(errno.ENOSPC, NO_SPACE)
        return really(descriptor, data)

    monkeypatch.setattr(os, "write", write)


def test_no_space_for_the_model_at_the_end(
    world: World, unbroken: dict[str, bytes], full_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refused(world, *world.train_words())
    monkeypatch.undo()
    assert f"export to {world.run / 'final'}: needs " in said
    assert "free are" in said
    assert "All steps are committed and the run is intact" in said
    assert f"headrace export {world.run} OUT" in said
    assert not [path for path in world.run.iterdir() if "final" in path.name]
    assert exit_code("export", world.run, world.folder / "elsewhere") == 0
    assert weights(world.folder / "elsewhere") == unbroken
    assert exit_code("resume", world.run) == 0
    assert weights(world.run / "final") == unbroken


def test_no_space_for_the_card_at_the_end(
    world: World, unbroken: dict[str, bytes], fill: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill("README.md")
    assert "All steps are committed and the run is intact" in refused(world, *world.train_words())
    assert not (world.run / "final").exists()
    monkeypatch.undo()
    assert exit_code("resume", world.run) == 0
    assert (world.run / "final" / "README.md").stat().st_size > 0


def test_no_space_for_an_export_of_a_run_that_can_go_on(ran: World, full_shards: None) -> None:
    out = ran.folder / "out"
    said = refused(ran, "export", ran.run, out)
    assert f"export to {out}: needs " in said
    assert f"The run is intact: repeat `headrace export {ran.run} OUT` then" in said
    assert not [path for path in ran.folder.iterdir() if "out" in path.name]


def finished(world: World) -> None:
    """Leave of a run what is left of it at its end: the model, and no state."""
    for name in (MANIFEST_NAME, *RECORD_NAMES):
        (world.run / name).unlink(missing_ok=True)


def test_no_space_for_an_export_of_a_finished_run(ran: World, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(ran)
    really = shutil.copytree

    def copytree(*places: Any, **options: Any) -> Any:
        really(*places, **options)
        raise shutil.Error([("a", "b", f"[Errno {errno.ENOSPC}] {NO_SPACE}: 'b'")])

    monkeypatch.setattr(shutil, "copytree", copytree)
    out = ran.folder / "out"
    said = refused(ran, "export", ran.run, out)
    monkeypatch.undo()
    assert f"export to {out}: needs " in said
    assert not [path for path in ran.folder.iterdir() if "out" in path.name]
    assert exit_code("export", ran.run, out) == 0
    assert weights(out) == weights(ran.run / "final")
    assert stat.S_IMODE(out.stat().st_mode) == 0o755


def test_an_export_leaves_a_directory_of_the_users_alone(ran: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its name is: an export once wrote into `OUT.partial`, and removed that when it failed."""
    finished(ran)
    precious = ran.folder / "out.partial" / "precious"
    precious.parent.mkdir()
    precious.write_text("x")
    assert exit_code("export", ran.run, ran.folder / "out") == 0
    assert not (ran.folder / "out" / "precious").exists()

    def copytree(*places: Any, **options: Any) -> Any:
        raise shutil.Error([("a", "b", "[Errno 13] Permission denied: 'b'"), ("c", "d", "[Errno 5] another")])

    monkeypatch.setattr(shutil, "copytree", copytree)
    said = refused(ran, "export", ran.run, ran.folder / "other")
    assert f"export to {ran.folder / 'other'}: [Errno 13] Permission denied: 'b'; name another directory" in said
    assert "another'" not in said
    assert precious.read_text() == "x"


def test_a_finished_export_is_on_the_disk_before_it_has_its_name(ran: World, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(ran)
    out, synced = ran.folder / "out", set()
    really = os.fsync

    def fsync(descriptor: int) -> None:
        assert not out.exists() or os.readlink(f"/proc/self/fd/{descriptor}") == str(ran.folder)
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        really(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert exit_code("export", ran.run, out) == 0
    assert {path.name for path in out.rglob("*")} <= synced
    assert ran.folder.name in synced


def test_an_error_that_is_told_already_is_not_told_twice(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"^mine$"), RunDirectory(tmp_path).writing():
        raise StorageError("mine")


@pytest.mark.parametrize("link", sampled([False, True]))
def test_an_empty_place_for_the_model_is_not_taken_for_the_model(
    world: World, unbroken: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, link: bool
) -> None:
    """Such as a link to a larger drive, put there while the run was under way."""
    drive, final = world.folder / "drive", world.run / "final"
    really = loop.step_tensors_of

    def make_place(batch: Any) -> Any:
        if world.run.exists() and not final.exists():
            (drive if link else final).mkdir()
            if link:
                final.symlink_to(drive)
        return really(batch)

    monkeypatch.setattr(loop, "step_tensors_of", make_place)
    assert exit_code(*world.train_words()) == 0
    assert final.is_symlink() == link
    assert weights(final) == unbroken


def test_a_finished_run_is_exported_through_a_link_and_clears_what_was_killed(ran: World) -> None:
    for name in (MANIFEST_NAME, *RECORD_NAMES):
        (ran.run / name).unlink(missing_ok=True)
    (ran.folder / "drive" / ".model.partial-dead").mkdir(parents=True)
    out = ran.folder / "out"
    out.symlink_to(ran.folder / "drive" / "model")
    assert exit_code("export", ran.run, out) == 0
    assert out.is_symlink()
    assert [path.name for path in (ran.folder / "drive").iterdir()] == ["model"]
    assert weights(out) == weights(ran.run / "final")
