"""A compression that is killed at any moment and begun again ends with the bytes of one that nobody disturbed."""

import json
import signal
from pathlib import Path
from typing import Any

import compressing
import pytest
from compressing import files_of, options, run, run_to_words
from forked import PROCESSES
from tiers import sampled

from headrace.compress.run import compress_model
from headrace.terms.errors import RunDirectoryError

MOMENTS = {f"call {calls}": calls for calls in (5, 60, 20, 35, 50, 75, 90, 105, 120)}


@pytest.mark.parametrize("calls", sampled(MOMENTS, ("call 5", "call 60")))
@pytest.mark.process
def test_killed_and_begun_again(dense: Path, dense_int4: Any, tmp_path: Path, calls: str) -> None:
    process = PROCESSES.Process(target=compressing.run_and_be_killed, args=(dense, tmp_path, MOMENTS[calls]))
    process.start()
    process.join(250)
    assert process.exitcode == -signal.SIGKILL, "there are fewer calls than that"
    assert not (tmp_path / "out").exists()
    run(dense, tmp_path)
    assert files_of(tmp_path) == files_of(dense_int4[0])
    assert not (tmp_path / "out.unfinished").exists()


@pytest.fixture(scope="module")
def undisturbed(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_to_words(mixture, folder)
    assert any(b"headrace.dictionary" in content for content in files_of(folder).values())
    return files_of(folder)


@pytest.mark.parametrize("calls", sampled(MOMENTS, ("call 50",)))
@pytest.mark.process
def test_ternary_weights_killed_and_begun_again(
    mixture: Path, undisturbed: dict[str, bytes], tmp_path: Path, calls: str
) -> None:
    """In any block: which dictionary a matrix gets, and the table in its file, are no matter of the process."""
    process = PROCESSES.Process(target=compressing.run_and_be_killed, args=(mixture, tmp_path, MOMENTS[calls], "ternary"))
    process.start()
    process.join(250)
    assert process.exitcode == -signal.SIGKILL, "there are fewer calls than that"
    assert not (tmp_path / "out").exists()
    run_to_words(mixture, tmp_path)
    assert files_of(tmp_path) == undisturbed
    assert not (tmp_path / "out.unfinished").exists()


class Stopped(Exception):
    """Stands for whatever ends a process."""


def stop_after(lines: int) -> Any:
    """Stop at this line about blocks; notices about the data come before them."""
    said: list[str] = []

    def say(text: str) -> None:
        said.extend([text] if text.startswith(("block", "going on")) else [])
        if len(said) == lines:
            raise Stopped

    return say


def test_other_options_do_not_go_on(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        compress_model(options(dense, tmp_path), say=stop_after(1))
    with pytest.raises(RunDirectoryError, match="was begun with group_size 32, asked for is 64"):
        compress_model(options(dense, tmp_path, group_size=64))
    with pytest.raises(Stopped):
        compress_model(options(dense, tmp_path), say=stop_after(2))
    assert (tmp_path / "out.unfinished" / "record.json").exists()


@pytest.mark.parametrize(
    ("marker", "lines"), sampled([(marker, lines) for marker in (None, 1, 3, "2", {}) for lines in (1, 2)], [(None, 1), (1, 2)])
)
def test_what_another_version_began_is_refused_in_one_line(
    marker: Any, lines: int, dense: Path, dense_int4: Any, tmp_path: Path
) -> None:
    """Its blocks may have other bytes. What this version began goes on, also from before there were days in the record."""
    with pytest.raises(Stopped):
        compress_model(options(dense, tmp_path), say=stop_after(lines))
    path = tmp_path / "out.unfinished" / "record.json"
    record = json.loads(path.read_text())
    identity = {name: value for name, value in record["identity"].items() if name not in ("form", "template_date")}
    older = identity if marker is None else identity | {"form": marker}
    path.write_text(json.dumps({**record, "identity": older}))
    left = {each: each.read_bytes() for each in path.parent.rglob("*") if each.is_file()}
    with pytest.raises(RunDirectoryError, match=r"was begun by another version, .* begin anew") as refused:
        run(dense, tmp_path)
    assert "\n" not in str(refused.value)
    assert {each: each.read_bytes() for each in path.parent.rglob("*") if each.is_file()} == left
    path.write_text(json.dumps({**record, "identity": {**identity, "form": record["identity"]["form"]}}))
    run(dense, tmp_path)
    assert files_of(tmp_path) == files_of(dense_int4[0])


@pytest.mark.parametrize("content", sampled(["", "[]", "{}", '{"identity": []}', '{"identity": null, "blocks": []}']))
def test_a_damaged_record_is_refused_in_one_line(content: str, dense: Path, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        compress_model(options(dense, tmp_path), say=stop_after(1))
    (tmp_path / "out.unfinished" / "record.json").write_text(content)
    with pytest.raises(RunDirectoryError, match=r"is damaged .* begin again"):
        run(dense, tmp_path)
