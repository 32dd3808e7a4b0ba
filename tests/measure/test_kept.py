"""What was measured before a run is found again by those for whom it holds, and one process of a machine measures at a time.

Run: pytest tests/measure/test_kept.py
"""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.measure import kept
from headrace.measure.kept import Wanted, alone, find_kept, keep
from headrace.plan.clock.machine_profiles import load_profile
from headrace.terms.machine.ceilings import Ceilings


@pytest.fixture
def drives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories are on the drive that the first letter of their name says."""
    monkeypatch.setattr(kept, "drive_name", lambda directory: directory.name[0])


def wanted(*names: str, dtype: str = "bfloat16") -> Wanted:
    return Wanted(directories=tuple(Path("/somewhere") / name for name in names), compute_dtype=dtype)


def machine_of(question: Wanted) -> Ceilings:
    """A machine whose drives read by their letters: a 1 GB/s, b 2 GB/s."""
    drive = load_profile("rtx4090-1ssd").drives[0]
    rates = [1e9 * (1 + ord(directory.name[0]) - ord("a")) for directory in question.measured]
    drives = tuple(
        replace(drive, read_bytes_per_second=rate, write_bytes_per_second=rate, mixed_bytes_per_second=rate) for rate in rates
    )
    return replace(load_profile("rtx4090-1ssd"), drives=drives)


def rates(ceilings: Ceilings | None) -> list[float]:
    assert ceilings is not None
    return [drive.read_bytes_per_second / 1e9 for drive in ceilings.drives]


@pytest.mark.usefixtures("drives")
def test_it_is_found_for_the_same_drives_in_any_order_a_figure_for_each_directory(tmp_path: Path) -> None:
    question = wanted("b1", "a1", "b2")
    assert [directory.name for directory in question.measured] == ["a1", "b1"]
    assert keep(tmp_path, question, machine_of(question)) is not None
    assert rates(find_kept(tmp_path, question)) == [2, 1, 2]
    assert rates(find_kept(tmp_path, wanted("a7", "b7"))) == [1, 2]
    for other in (wanted("a1"), wanted("a1", "b1", "c1"), wanted("a1", "b1", dtype="float32")):
        assert find_kept(tmp_path, other) is None


@pytest.mark.usefixtures("drives")
def test_it_is_not_found_on_another_processor_with_other_cores_or_another_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path, wanted("a"), machine_of(wanted("a")))
    changes = {
        "processor_name": lambda: "another processor",
        "torch.get_num_threads": lambda: torch.get_num_threads() + 1,
        "torch.cuda.device_count": lambda: 1,
        "CpuMachine.multiplies": lambda machine, dtype: dtype == "float16",
    }
    cores = torch.get_num_threads()
    changes["torch.get_num_threads"] = lambda: cores + 1
    for name, value in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
            patch.setattr(f"headrace.measure.kept.{name}", value)
            assert find_kept(tmp_path, wanted("a")) is None, name
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "0.1")
        assert find_kept(tmp_path, wanted("a")) is None
    assert find_kept(tmp_path, wanted("a")) is not None


@pytest.mark.usefixtures("drives")
def test_what_cannot_be_read_or_written_is_as_good_as_none(tmp_path: Path) -> None:
    path = keep(tmp_path, wanted("a"), machine_of(wanted("a")))
    assert path is not None
    whole = path.read_text()
    for text in ("", "{", "[]", "{}", whole.replace('"ceilings"', '"else"'), whole.replace('"cores"', '"kernels"')):
        path.write_text(text)
        assert find_kept(tmp_path, wanted("a")) is None, text[:20]
    (tmp_path / "file").write_text("")
    assert keep(tmp_path / "file", wanted("a"), machine_of(wanted("a"))) is None


@pytest.mark.process
def test_one_at_a_time_and_a_killed_process_is_no_hindrance() -> None:
    name = f"\0headrace test {os.getpid()}"
    with alone(0.0, name) as first, alone(0.05, name) as second:
        assert (first, second) == (True, False)
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with alone(5.0, name) as held:
            os.write(tell, b"1" if held else b"0")
            time.sleep(60)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"1"
        with alone(0.05, name) as held:
            assert not held
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(tell)
    with alone(5.0, name) as held:
        assert held
