"""What all tests share: they are the same on all machines and at all times, so that a red CI is the change's fault.

Properties are tried on the same examples in each run;
`make soak` draws fresh examples (`--hypothesis-profile=fresh`).
"""

import gc
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from time_ledger import MOST_PERCENT, CpuClock, TimeLedger

from headrace.files import describe_directory

ROOT = Path(__file__).parents[1]

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("fresh", deadline=None)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--time-ledger", action="store_true", help="fail if the tests of a folder take more than their share of the time"
    )


def pytest_configure(config: pytest.Config) -> None:
    work_on_a_drive()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # for processes started
    config.pluginmanager.register(CpuClock(), "cpu_clock")
    if config.getoption("time_ledger") and not hasattr(config, "workerinput"):  # workers report to it
        config.pluginmanager.register(TimeLedger(MOST_PERCENT), "time_ledger")


def work_on_a_drive() -> None:
    """Where temporary files would lie in memory, keep them in a directory beside the tests: runs refuse states there."""
    if describe_directory(Path(tempfile.gettempdir())).in_memory:
        directory = ROOT / ".tests-tmp"
        directory.mkdir(exist_ok=True)
        os.environ["TMPDIR"], tempfile.tempdir = str(directory), None  # for processes started, and for this one


def pytest_collection_finish() -> None:
    """Leave what imports made out of all collections to come: each takes a third of a second otherwise, and engines ask for
    one when they are opened.
    """
    gc.collect()
    gc.freeze()
