"""Weights copied to drives: the bits of those in place, a copy that is whole or is not read, and one line for what is wrong."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from some_prompts import prompts
from tiers import sampled

from headrace.files import Bandwidth, Extent, Volume
from headrace.generate.passes.asked import plan_generation
from headrace.generate.passes.copying import why_no_copy
from headrace.generate.passes.generator import Generator
from headrace.generate.plan.peaks import with_peaks
from headrace.generate.uses.evaluating import evaluate_model
from headrace.machine.host_memory import huge_page_buffer
from headrace.plan.clock.machine_profiles import load_profile
from headrace.store.copied_files import WeightFiles
from headrace.store.weight_copy import PREFIX, WeightCopy
from headrace.terms.errors import ConfigError, CorruptData, DiskFull, RunDirectoryError, StorageError
from headrace.terms.events import Event, Notice
from headrace.terms.options.budget import Budget
from headrace.terms.options.eval_options import EvalOptions
from headrace.terms.options.generate_options import GenerateOptions

SMALL = {"stripe_bytes": 4096, "piece_bytes": 8192}


def silent(event: Event) -> None:
    """Nothing is said."""


@pytest.fixture
def drives(tmp_path: Path) -> list[Path]:
    places = [tmp_path / name for name in ("nvme0", "nvme1", "nvme2")]
    for place in places:
        place.mkdir()
    return places


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Files of sizes that are no whole blocks."""
    random, paths = np.random.default_rng(0), []
    for number, size in enumerate((70_001, 5, 33_333)):
        paths.append(tmp_path / f"shard-{number}.safetensors")
        paths[-1].write_bytes(random.bytes(size))
    return paths


def copy_of(files: Sequence[Path], drives: Sequence[Path]) -> WeightCopy:
    return WeightCopy(WeightFiles.of(files), drives, **SMALL)


def content(copy: WeightCopy, files: Sequence[Path]) -> bytes:
    """What is read of the files' extents, from the copy."""
    reader, found = copy.reader(silent), b""
    for path in files:
        size = path.stat().st_size
        into = huge_page_buffer(-(-size // 4096) * 4096)
        half = into.size // 8192 * 4096
        parts = (Extent(path, half, into.size - half, half), Extent(path, 0, half, 0)) if half else (Extent(path, 0, 4096, 0),)
        reader.read(parts, into).wait()
        found += into[:size].tobytes()
    reader.close()
    return found


def test_a_copy_holds_the_bytes_of_the_files(files: list[Path], drives: list[Path]) -> None:
    copy = copy_of(files, drives)
    assert not copy.is_whole
    copy.make((2, 1, 1), silent)
    assert copy.is_whole
    assert copy_of(files, drives[::-1]).is_whole  # named in another order
    assert content(copy, files) == b"".join(path.read_bytes() for path in files)
    assert all((folder / "data").stat().st_size > 20_000 for folder in copy.folders)
    assert not copy_of(files, drives[:2]).is_whole  # other drives: another copy


def test_files_that_were_changed_are_another_copy(files: list[Path], drives: list[Path]) -> None:
    """Also where size and time are as before."""
    before = copy_of(files, drives)
    before.make((1, 1, 1), silent)
    status = files[0].stat()
    files[0].write_bytes(bytes([files[0].read_bytes()[0] ^ 1]) + files[0].read_bytes()[1:])
    os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    after = copy_of(files, drives)
    assert not after.is_whole
    assert set(after.outdated()) == set(before.folders)
    after.make((1, 1, 1), silent)
    assert content(after, files) == b"".join(path.read_bytes() for path in files)


class Cut(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("pieces", [0, 1, 5, 13])
def test_a_copy_that_was_cut_short_goes_on(
    pieces: int, files: list[Path], drives: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.store.weight_copy._PIECES_TOGETHER", 1)
    write, written = Volume.write, []

    def cut(volume: Volume, offset: int, data: Any) -> Any:
        if len(written) == pieces:
            raise Cut
        written.append(offset)
        return write(volume, offset, data)

    with monkeypatch.context() as patch:
        patch.setattr(Volume, "write", cut)
        with pytest.raises(Cut):
            copy_of(files, drives).make((1, 1, 1), silent)
    copy = copy_of(files, drives)
    assert not copy.is_whole
    assert copy.copied_bytes == pieces * 8192
    with (copy.folders[0] / "sums").open("ab") as file:
        file.write(b"half")  # of a sum
    again = []

    def counted(volume: Volume, offset: int, data: Any) -> Any:
        again.append(offset)
        return write(volume, offset, data)

    with monkeypatch.context() as patch:
        patch.setattr(Volume, "write", counted)
        copy.make((1, 1, 1), silent)
    assert again == list(range(pieces * 8192, copy.files.num_bytes, 8192))
    assert content(copy, files) == b"".join(path.read_bytes() for path in files)


def test_what_a_drive_lost_is_copied_again(files: list[Path], drives: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a power cut: the sums are there, the piece is not. Where a drive gives back something else, that is said."""
    verify = WeightCopy._verify

    def cut(copy: WeightCopy, volume: Volume) -> None:
        raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(WeightCopy, "_verify", cut)
        with pytest.raises(Cut):
            copy_of(files, drives).make((1, 1, 1), silent)
    copy = copy_of(files, drives)
    with (copy.folders[1] / "data").open("r+b") as file:
        file.write(bytes(100))
    copy.make((1, 1, 1), silent)
    assert content(copy, files) == b"".join(path.read_bytes() for path in files)
    with (copy.folders[0] / "data").open("r+b") as file:
        file.write(bytes(100))
    with pytest.raises(CorruptData, match=r"not what was copied.*remove"):
        copy.reader(silent)

    def damaging(copy: WeightCopy, volume: Volume) -> None:
        with (copy.folders[2] / "data").open("r+b") as file:
            file.write(bytes(100))
        verify(copy, volume)

    monkeypatch.setattr(WeightCopy, "_verify", damaging)
    fresh = copy_of(files[:1], drives)
    with pytest.raises(CorruptData, match="drive may be failing"):
        fresh.make((1, 1, 1), silent)
    assert not fresh.is_whole


def test_a_drive_that_is_full_has_nothing_left_on_it(
    files: list[Path], drives: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved = []

    def full(descriptor: int, offset: int, size: int) -> None:
        if size > 8192:
            reserved.append(size)
            if len(reserved) == 2:
                raise OSError(28, "No space left on device")

    monkeypatch.setattr("headrace.files.direct.os.posix_fallocate", full)
    with pytest.raises(DiskFull, match=PREFIX):
        copy_of(files, drives).make((1, 1, 1), silent)
    assert not any(list(drive.iterdir()) for drive in drives)
    monkeypatch.setattr("headrace.store.run_folders.default_bytes", lambda tier, found: 0)
    with pytest.raises(DiskFull, match="a copy of the weights needs"):
        copy_of(files, drives).make((1, 1, 1), silent)
    assert not any(list(drive.iterdir()) for drive in drives)


def test_two_processes_do_not_make_one_copy(files: list[Path], drives: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def another(copy: WeightCopy, volume: Volume) -> None:
        copy_of(files, drives).make((1, 1, 1), silent)

    monkeypatch.setattr(WeightCopy, "_verify", another)
    with pytest.raises(RunDirectoryError, match=rf"process {os.getpid()} copies"):
        copy_of(files, drives).make((1, 1, 1), silent)


def test_files_that_change_meanwhile_give_no_copy(
    files: list[Path], drives: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = WeightCopy._verify

    def changing(copy: WeightCopy, volume: Volume) -> None:
        verify(copy, volume)
        files[0].write_bytes(b"other")

    copy = copy_of(files, drives)
    monkeypatch.setattr(WeightCopy, "_verify", changing)
    with pytest.raises(StorageError, match="changed while"):
        copy.make((1, 1, 1), silent)
    assert not copy.is_whole


KILLED = """
import sys
from pathlib import Path
from headrace.store import weight_copy
weight_copy._PIECES_TOGETHER = 1
files, drives = sorted(Path(sys.argv[1]).glob("*.safetensors")), sorted(Path(sys.argv[1]).glob("nvme*"))
copy = weight_copy.WeightCopy(weight_copy.WeightFiles.of(files), drives, stripe_bytes=4096, piece_bytes=8192)
copy.make((1, 1, 1), lambda event: None)
"""


@pytest.mark.deep
@pytest.mark.parametrize("pieces", [1, 20, 60, 120])
@pytest.mark.process
def test_a_copy_that_is_killed_for_good_goes_on(pieces: int, drives: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    path.write_bytes(np.random.default_rng(1).bytes(1_000_001))
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    copy = copy_of([path], drives)
    while process.poll() is None and copy.copied_bytes < pieces * 8192:
        time.sleep(0.0005)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=True)
    assert copy.is_whole
    assert content(copy, [path]) == path.read_bytes()


# -- generations --------------------------------------------------------------------------------------------------------


def answers(directory: Path, ssd: Sequence[Path], copy_weights: bool | None, said: list[str]) -> dict[int, tuple[int, ...]]:
    def note(event: Event) -> None:
        if isinstance(event, Notice):
            said.append(event.text)

    budget = Budget(host="4GiB", ssd=ssd)
    with Generator.open(directory, budget, rows=2, seats=2, sink=note, copy_weights=copy_weights) as generator:
        return dict(generator.generate(prompts(4), max_new_tokens=6, do_sample=False, eos_token_id=None))


@pytest.mark.parametrize("name", sampled(["llama", "mixtral", "gemma3"], ["mixtral"]))
def test_answers_are_those_of_weights_in_place(name: str, directory_of: Callable[..., Path], drives: list[Path]) -> None:
    directory, said = directory_of(name), list[str]()
    in_place = answers(directory, (), None, said)
    assert answers(directory, drives, True, said) == in_place
    made = next(text for text in said if "are copied" in text)
    assert "rm -r" in made
    assert all(list(drive.glob(PREFIX + "*")) for drive in drives)
    said.clear()
    assert answers(directory, drives, None, said) == in_place
    assert [text for text in said if "read from their copy" in text]
    assert not [text for text in said if "are copied" in text]


def test_a_loss_is_measured_by_a_copy(model: Path, drives: list[Path], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "water flows downhill, and turbines turn"}\n', encoding="utf-8")
    given = {"data": [str(tmp_path / "a.jsonl")], "cache": tmp_path, "host_memory": "4GiB", "sequence_length": 64}
    in_place = evaluate_model(model, EvalOptions.of(given))
    copied = evaluate_model(model, EvalOptions.of({**given, "ssd": [str(drive) for drive in drives], "copy_weights": True}))
    assert copied.loss == in_place.loss
    assert all(list(drive.glob(PREFIX + "*")) for drive in drives)


def test_a_copy_is_made_where_it_pays(
    directory_of: Callable[..., Path], drives: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on the drives that have the files, and not where these are as fast; else where passes read weights."""
    directory = directory_of("llama")
    paths = sorted(directory.glob("*.safetensors"))
    assert "have them already" in why_no_copy(paths, drives)
    monkeypatch.setattr("headrace.generate.passes.copying.on_drives_of", lambda paths, directories: False)
    monkeypatch.setattr("headrace.files.directory_facts.measure_directory", lambda path, size: Bandwidth(2e9, 1e9, 1e9))
    monkeypatch.setattr("headrace.generate.passes.copying.measured_reading", lambda paths: 1e9)
    # Three directories of one drive of 2 GB/s.
    assert why_no_copy(paths, drives) == ""
    monkeypatch.setattr("headrace.generate.passes.copying.measured_reading", lambda paths: 1.9e9)
    assert "would be read at" in why_no_copy(paths, drives)


def test_weights_that_stay_in_memory_are_not_copied(directory_of: Callable[..., Path], drives: list[Path]) -> None:
    said: list[str] = []
    answers(directory_of("llama"), drives, None, said)
    assert not any(list(drive.glob(PREFIX + "*")) for drive in drives)


@pytest.mark.wide
def test_a_plan_says_what_a_copy_takes(directory_of: Callable[..., Path], drives: list[Path]) -> None:
    """Where passes read weights: of the drives that have the files none is made, on another machine all its drives are used."""
    model, sizes = str(directory_of("gemma3") / "config.json"), {"prompts": 1, "prompt_length": 8, "new_tokens": 4}
    machine = load_profile("rtx4090-4ssd")
    options = GenerateOptions.of({"device_memory": "1GiB", "host_memory": "64GiB"})

    def notes(model: str, options: GenerateOptions, *, here: bool) -> str:
        return plan_generation(model, options, None if here else machine, here=here, **sizes).explain()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.generate.plan.search._filled", lambda plan, allowance: iter([with_peaks(plan, allowance)]))
        assert "copied to 4 drives, striped once" in notes(model, options, here=False)
        ssd = GenerateOptions.of({"host_memory": "4GiB", "ssd": drives})
        assert "have them already" in notes(str(directory_of("gemma3")), ssd, here=True)
        assert "copied to 3 drives, striped, if these read faster, once" in notes(model, ssd, here=True)
    assert "copied" not in notes(model, options, here=False)


@pytest.mark.parametrize("options", [GenerateOptions, EvalOptions])
def test_a_copy_without_a_place_is_refused(options: Any) -> None:
    with pytest.raises(ConfigError, match="copy_weights: no drive"):
        options.of({"copy_weights": True, "data": ["a"]} if options is EvalOptions else {"copy_weights": True})
