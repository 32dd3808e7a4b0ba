"""Kept beginnings of prompts on a drive: what is there is used or passed over, whatever happened to it, never wrong."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.store.prefix_files import FOLDER, PrefixFiles, remove_prefixes
from headrace.terms.errors import RunDirectoryError, StorageError

OWNER, TOKENS, CONTENT = ("key", None), (1, 2, 3), b"what a chunk leaves" * 40


def only(directory: Path) -> Path:
    (found,) = (directory / FOLDER).iterdir()
    return found


def test_what_is_written_is_read_by_the_next_process_of_the_same_identity_alone(tmp_path: Path) -> None:
    files = PrefixFiles(tmp_path, "model", 10_000)
    assert files.write(OWNER, TOKENS, CONTENT)
    files.close()
    assert stat.S_IMODE(only(tmp_path).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / FOLDER).stat().st_mode) == 0o700
    again, other = PrefixFiles(tmp_path, "model", 10_000), PrefixFiles(tmp_path, "another", 10_000)
    assert again.read(OWNER, TOKENS) == CONTENT
    assert again.read(("another", None), TOKENS) is None
    assert again.read(OWNER, (1, 2)) is None
    assert other.read(OWNER, TOKENS) is None
    with pytest.raises(RunDirectoryError, match="a server uses it"):
        remove_prefixes(tmp_path / FOLDER)
    again.close()
    other.close()
    remove_prefixes(tmp_path / FOLDER)
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, len(CONTENT) + 31), change=st.integers(1, 255), cut=st.booleans())
def test_damage_anywhere_is_passed_over(tmp_path_factory: pytest.TempPathFactory, at: int, change: int, cut: bool) -> None:
    directory = tmp_path_factory.mktemp("damaged")
    files = PrefixFiles(directory, "model", 10_000)
    files.write(OWNER, TOKENS, CONTENT)
    path = only(directory)
    whole = bytearray(path.read_bytes())
    if cut:
        del whole[at:]
    else:
        whole[at] ^= change
    path.write_bytes(whole)
    assert files.read(OWNER, TOKENS) is None
    assert not path.exists()
    assert files.num_bytes == 0
    files.close()


def test_a_file_under_another_name_is_passed_over(tmp_path: Path) -> None:
    files = PrefixFiles(tmp_path, "model", 10_000)
    files.write(OWNER, TOKENS, CONTENT)
    first = only(tmp_path)
    files.write(OWNER, (4, 5), b"other")
    os.replace(first, next(path for path in (tmp_path / FOLDER).iterdir() if path != first))
    assert files.read(OWNER, (4, 5)) is files.read(OWNER, TOKENS) is None
    files.close()


@given(writes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 400)), max_size=20), most=st.integers(0, 900))
@settings(max_examples=60, deadline=None)
def test_the_files_stay_within_their_room(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, int]], most: int
) -> None:
    directory = tmp_path_factory.mktemp("room")
    files, latest = PrefixFiles(directory, "model", most), dict[int, bytes]()
    for number, (token, size) in enumerate(writes):
        latest.setdefault(token, bytes([number]) * size)
        there = files.write(OWNER, (token,), latest[token])
        sizes = [path.stat().st_size for path in (directory / FOLDER).iterdir()]
        assert files.num_bytes == sum(sizes) <= most
        assert files.read(OWNER, (token,)) == (latest[token] if there else None)
        if files.read(OWNER, (token,)) is None:
            del latest[token]
        for other in set(latest) - {token}:
            if files.read(OWNER, (other,)) is None:
                del latest[other]
    files.close()


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"prefix_ssd: .*file/headrace-prefixes: Not a directory; name another drive"):
        PrefixFiles(tmp_path / "file", "model", 100)
