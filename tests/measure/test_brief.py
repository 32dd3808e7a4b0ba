"""Before a long run the machine is measured within the run's own budgets, and nothing of it stays.

Run: pytest tests/measure/test_brief.py
"""

import fcntl
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from headrace.machine.cpu import CpuMachine
from headrace.machine.host_memory import anonymous_bytes
from headrace.machine.meter import MemoryMeter
from headrace.measure.brief import LEAST_HOST_BYTES, MeasuringRoom, look_at_products, measure_briefly
from headrace.measure.drives import DriveFile, remove_leftovers
from headrace.terms.errors import ConfigError, StorageError
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.sizes import MIB


def measured_at(folder: Path) -> tuple[Ceilings, int]:
    """What a hurried measurement finds on two directories in a folder, and the memory that it took."""
    asked = CpuMachine(), (folder / "one", folder / "two"), "bfloat16", MeasuringRoom(host_bytes=LEAST_HOST_BYTES)
    measure_briefly(*asked, seconds=0.05)  # kernels are compiled, libraries loaded
    before = anonymous_bytes()
    with MemoryMeter() as meter:
        ceilings = measure_briefly(*asked, seconds=1.0)
        return ceilings, meter.peak_bytes() - before


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ceilings, int, Path]:
    """The same from a process of its own, for what other tests left to this one's heap comes and goes; and where it was."""
    folder = tmp_path_factory.mktemp("drives")
    (folder / "one").mkdir()
    (folder / "two").mkdir()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return *process.submit(measured_at, folder).result(), folder


@pytest.mark.process
def test_it_has_the_figures_that_plans_ask_for(measured: tuple[Ceilings, int, Path]) -> None:
    ceilings, _, _ = measured
    assert Ceilings.from_json(ceilings.to_json()) == ceilings
    assert list(ceilings.flops_per_second) == ["bfloat16"]
    assert len(ceilings.drives) == 2
    assert ceilings.commit_seconds > 0
    assert ceilings.launch_seconds > 0


@pytest.mark.process
def test_it_stays_inside_its_room_and_leaves_no_file(measured: tuple[Ceilings, int, Path]) -> None:
    _, taken_bytes, folder = measured
    assert 8 * MIB < taken_bytes < LEAST_HOST_BYTES
    assert [list(directory.iterdir()) for directory in sorted(folder.iterdir())] == [[], []]


def test_where_there_is_no_room_or_no_directory_nothing_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"1 MiB of memory are left, 64 MiB are needed"):
        measure_briefly(CpuMachine(), (tmp_path,), "bfloat16", MeasuringRoom(host_bytes=MIB))
    with pytest.raises(StorageError, match="no such directory"):
        measure_briefly(CpuMachine(), (tmp_path / "nowhere",), "bfloat16", MeasuringRoom(host_bytes=LEAST_HOST_BYTES))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_look_at_products_gives_a_rate(dtype: str) -> None:
    assert 1e6 < look_at_products(CpuMachine(), dtype) < 1e17


def test_a_drive_that_is_slow_is_filled_in_part_and_read_there_only(tmp_path: Path) -> None:
    with DriveFile(tmp_path, 64 * MIB) as drive:
        drive.fill(0.0, MIB)
        assert drive.filled_bytes == 4 * MIB
        assert drive.transfer_seconds() > 0
        drive.fill()
        assert drive.filled_bytes == 64 * MIB


def test_what_a_killed_measurement_left_goes_with_the_next_but_not_what_is_in_use(tmp_path: Path) -> None:
    dead, living = (tmp_path / f".headrace-bench-{name}" for name in ("dead", "living"))
    for folder in (dead, living):
        folder.mkdir()
        (folder / "data").write_text("x")
    (tmp_path / ".headrace-bench-link").symlink_to(living)
    descriptor = os.open(living, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with DriveFile(tmp_path, 64 * MIB):
            assert not dead.exists()
            assert (living / "data").exists()
    finally:
        os.close(descriptor)
    remove_leftovers(tmp_path)
    assert not living.exists()
