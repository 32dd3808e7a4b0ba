"""`headrace clean`: what dead runs left is listed and removed; what lives or can be resumed stays.

Run: pytest tests/cli/test_cli_clean.py
"""

import errno
import shutil
from pathlib import Path

import pytest
from bad_worlds import World, check_refusal, listing

from headrace.cli import cleaning, main
from headrace.store import Leftover, StateStore, StoreRequest
from headrace.store.manifest import RECORD_NAMES, withdraw_manifest
from headrace.terms.errors import ConfigError
from headrace.terms.families import trained_unit
from headrace.terms.layout import lay_out
from headrace.update.rules.adamw import adamw_planes


def clean(world: World, *words: object) -> str:
    assert world.capsys is not None
    world.capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["clean", *(str(word) for word in words)])
    assert not left.value.code
    return world.capsys.readouterr().out


def test_a_run_that_can_be_resumed_is_kept_and_the_way_is_named(ran: World) -> None:
    before = listing(ran.folder)
    said = clean(ran, ran.ssd)
    assert f"headrace resume {ran.run}" in said
    assert "1 that can be resumed kept (--unfinished removes them)" in said
    assert listing(ran.folder) == before


@pytest.mark.parametrize("where", ["ssd", "run"])
def test_unfinished_removes_state_and_records_and_no_more(ran: World, where: str) -> None:
    before = listing(ran.folder)
    words = (getattr(ran, where), "--unfinished")
    assert "would remove" in clean(ran, *words, "--dry-run")
    assert listing(ran.folder) == before
    assert "1 leftover removed" in clean(ran, *words)
    assert list(ran.ssd.iterdir()) == []
    gone = set(before) - set(listing(ran.folder))
    assert all(name.startswith("ssd/headrace-") or name in {"run/state.json", "run/commit.0", "run/commit.1"} for name in gone)
    assert (ran.run / "final" / "config.json").exists()


def test_the_state_of_a_run_directory_that_is_gone_is_removed_only_when_asked(ran: World) -> None:
    """It may have been moved, or its drive is not mounted just now."""
    shutil.rmtree(ran.run)
    before = listing(ran.folder)
    said = clean(ran, ran.ssd)
    assert f"its run is not in {ran.run}" in said
    assert "0 leftovers removed" in said
    assert "1 whose run is not where it was kept (--unfinished removes them)" in said
    assert listing(ran.folder) == before
    said = clean(ran, ran.ssd, "--unfinished")
    assert "1 leftover removed" in said
    assert str(ran.run) in said
    assert list(ran.ssd.iterdir()) == []


def test_a_run_that_was_moved_is_kept_and_found_from_its_new_place(ran: World) -> None:
    moved = ran.folder / "moved"
    ran.run.rename(moved)
    assert "0 leftovers removed" in clean(ran, ran.ssd)
    assert f"headrace resume {moved}" in clean(ran, moved)
    assert "1 leftover removed" in clean(ran, ran.ssd, moved, "--unfinished")
    assert list(ran.ssd.iterdir()) == []
    assert not (moved / "state.json").exists()


def test_a_run_that_was_moved_is_left_alone_while_in_use(ran: World) -> None:
    moved = ran.folder / "moved"
    ran.run.rename(moved)
    with StateStore.open(moved, sink=lambda event: None):
        before = listing(ran.folder)
        assert "0 leftovers removed" in clean(ran, ran.ssd, moved, "--unfinished")
        assert listing(ran.folder) == before


def test_a_run_in_use_is_left_alone(ran: World) -> None:
    store = StateStore.open(ran.run, sink=lambda event: None)
    try:
        before = listing(ran.folder)
        assert "0 leftovers removed" in clean(ran, ran.ssd, "--unfinished")
        assert listing(ran.folder) == before
    finally:
        store.close()


def test_a_damaged_manifest_is_said_plainly(ran: World) -> None:
    (ran.run / "state.json").write_text("{")
    assert "state.json" in ran.refused("clean", ran.run)


def test_what_cannot_be_removed_is_said_and_keeps_nothing_else(ran: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is with a folder of another user's."""
    other = ran.folder / "other-ssd"
    shutil.copytree(ran.ssd, other)
    shutil.rmtree(ran.run)
    unlink = Path.unlink

    def refusing(path: Path, missing_ok: bool = False) -> None:
        if other in path.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refusing)
    before = listing(other)
    with pytest.raises(SystemExit) as left:
        main(["clean", str(other), str(ran.ssd), "--unfinished"])
    assert ran.capsys is not None
    said = ran.capsys.readouterr()
    check_refusal(int(left.value.code or 0), said.err)
    assert f"{other}" in said.err
    assert "Permission denied" in said.err
    assert "1 leftover removed" in said.out
    assert listing(other) == before
    assert list(ran.ssd.iterdir()) == []


def two_ssds(folder: Path, capsys: pytest.CaptureFixture[str]) -> World:
    """A world of which only the state is needed: a run over two SSD directories, that has a step."""
    layouts = (lay_out("block 0", [("weight", (64, 64), (1.0, 0.1))]),)
    ssds = [folder / "ssd0", folder / "ssd1"]
    for ssd in ssds:
        ssd.mkdir()
    units = [trained_unit(layout, adamw_planes("bfloat16"), 2048) for layout in layouts]
    StateStore.create(folder / "run", StoreRequest(ssds, units, 4096), sink=lambda event: None).close()
    return World(folder, capsys)


def test_the_rest_of_a_run_of_which_a_part_was_cleaned_is_dead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = two_ssds(tmp_path, capsys)
    assert "1 leftover removed" in clean(world, tmp_path / "ssd0", "--unfinished")
    assert "1 leftover removed" in clean(world, tmp_path / "ssd1")
    assert [path.name for path in world.run.iterdir()] == ["lock"]


def test_a_removal_that_was_cut_short_is_ended_from_the_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = two_ssds(tmp_path, capsys)
    withdraw_manifest(world.run)
    assert "2 leftovers removed" in clean(world, world.run)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["lock"]


def test_a_folder_under_two_paths_is_counted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a drive that is mounted twice has it; here a link that is never resolved."""
    world = two_ssds(tmp_path, capsys)
    (tmp_path / "again").symlink_to(tmp_path / "ssd0")
    really = Path.resolve
    monkeypatch.setattr(Path, "resolve", lambda self: self.absolute() if "again" in str(self) else really(self))
    assert "1 leftover removed" in clean(world, tmp_path / "ssd0", tmp_path / "again", "--unfinished")


def test_a_run_with_damaged_records_is_not_said_to_go_on(ran: World) -> None:
    for name in RECORD_NAMES:
        path = ran.run / name
        path.write_bytes(path.read_bytes()[:100] + b"damage" + path.read_bytes()[106:])
    before = listing(ran.folder)
    said = clean(ran, ran.ssd)
    assert "commit.0 and commit.1 are damaged" in said
    assert "headrace resume" not in said
    assert "1 whose commit records are damaged kept (--unfinished removes them)" in said
    assert listing(ran.folder) == before
    assert "1 leftover removed" in clean(ran, ran.run, "--unfinished")


def test_a_run_that_is_taken_up_meanwhile_keeps_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = two_ssds(tmp_path, capsys)
    really = cleaning.remove_leftover

    def remove(leftover: Leftover) -> None:
        if leftover.folder.parent.name == "ssd0":
            raise ConfigError(f"{leftover.folder}: its run is in use by process 1 again; nothing was removed")
        really(leftover)

    monkeypatch.setattr(cleaning, "remove_leftover", remove)
    said = clean(world, tmp_path / "ssd0", tmp_path / "ssd1", "--unfinished")
    assert "in use by process 1 again" in said
    assert "1 leftover removed" in said
