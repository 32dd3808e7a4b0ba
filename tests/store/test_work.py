"""Work that can be killed: what goes on, and what is refused. Run: pytest tests/store/test_work.py"""

from pathlib import Path

import pytest

from headrace.store.work import DONE, RECORD, Work, day_begun, held
from headrace.terms.errors import ConfigError, RunDirectoryError, StorageError

ASKED = {"form": 1, "seed": 3, "template_date": "2026-11-29"}


def begun(folder: Path, items: int = 2) -> Work:
    folder.mkdir(exist_ok=True)
    work = Work.open(folder, ASKED)
    work.begin()
    for number in range(items):
        work.add({"number": number, "text": "ä\n"})
    return work


def test_items_come_back_in_their_order_and_a_torn_last_one_is_cut_off(tmp_path: Path) -> None:
    begun(tmp_path)
    for torn in (b'{"number": 2, "te', b'{"number": 2, "te\n', b"\0\0\0\n"):  # a power cut may keep the end of a line alone
        with (tmp_path / DONE).open("ab") as file:
            file.write(torn)
        work = Work.open(tmp_path, ASKED)
        assert work.has_begun
        assert [item["number"] for item in work.done()] == [0, 1]
        work.add({"number": 2})
        assert [item["number"] for item in work.done()] == [0, 1, 2]
        (tmp_path / DONE).write_bytes(b"".join((tmp_path / DONE).read_bytes().splitlines(keepends=True)[:2]))


def test_a_damaged_line_before_the_last_is_refused(tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / DONE).write_bytes(b"x" + (tmp_path / DONE).read_bytes())
    with pytest.raises(RunDirectoryError, match=rf"{DONE}: is damaged .* begin again"):
        list(Work.open(tmp_path, ASKED).done())


def test_what_is_asked_otherwise_is_refused_and_what_a_record_does_not_know_has_its_default(tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(RunDirectoryError, match="was begun with seed 3, asked for is 4"):
        Work.open(tmp_path, {**ASKED, "seed": 4})
    with pytest.raises(RunDirectoryError, match="by another version"):
        Work.open(tmp_path, {**ASKED, "form": 2})
    assert Work.open(tmp_path, {**ASKED, "new": 7}, {"new": 7}).has_begun
    with pytest.raises(RunDirectoryError, match="was begun with new 7, asked for is 8"):
        Work.open(tmp_path, {**ASKED, "new": 8}, {"new": 7})
    assert day_begun(tmp_path) == "2026-11-29"
    for damaged in ("", "[]", "{}", '{"identity": [3]}'):
        (tmp_path / RECORD).write_text(damaged)
        assert day_begun(tmp_path) is None
        with pytest.raises(RunDirectoryError, match=r"is damaged .* begin again"):
            Work.open(tmp_path, ASKED)


def test_items_without_a_record_are_of_nobody_knows_what_and_stay(tmp_path: Path) -> None:
    """As an earlier version left them, or damage: they are neither taken into other work nor removed."""
    folder = tmp_path / "out.job"
    begun(folder)
    (folder / RECORD).rename(folder / "job.json")
    kept = (folder / DONE).read_bytes()
    with pytest.raises(RunDirectoryError, match=rf"{DONE}: .* no {RECORD}"), held(folder):
        Work.open(folder, ASKED)
    assert (folder / DONE).read_bytes() == kept
    assert (folder / "job.json").exists()


def test_a_folder_that_was_there_is_removed_by_success_alone(tmp_path: Path) -> None:
    """Something of its owner's may lie in it."""
    folder = tmp_path / "out.job"
    folder.mkdir()
    (folder / "notes.txt").touch()
    for error in (KeyboardInterrupt, ConfigError):
        with pytest.raises(error):
            fail(folder, error, begins=False)
        assert (folder / "notes.txt").exists()


def fail(folder: Path, error: type[BaseException], *, begins: bool) -> None:
    with held(folder, useless=(ConfigError,)):
        if begins:
            begun(folder)
        raise error("so")


@pytest.mark.parametrize(("error", "stays"), [(KeyboardInterrupt, True), (RunDirectoryError, True), (ConfigError, False)])
def test_the_folder_stays_where_work_can_go_on(error: type[BaseException], stays: bool, tmp_path: Path) -> None:
    folder = tmp_path / "out.job"
    for begins in (True, False):
        with pytest.raises(error):
            fail(folder, error, begins=begins)
        assert folder.exists() is (stays and begins)
        with held(folder), pytest.raises(RunDirectoryError, match="in use by process"), held(folder):
            pass
        assert not folder.exists(), "it is done"


def test_a_folder_that_cannot_be_made_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"), held(tmp_path / "file" / "job"):
        pass
