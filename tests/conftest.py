"""What all tests share: they are the same on all machines and at all times, so that a red CI is the change's fault.

Properties are tried on the same examples in each run;
`make soak` draws fresh examples (`--hypothesis-profile=fresh`).
"""

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from kept_profiles import KeptProfiles
from time_ledger import MOST_PERCENT, CpuClock, TimeLedger

from headrace.files import describe_directory

ROOT = Path(__file__).parents[1]

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("fresh", deadline=None)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--time-ledger",
        action="store_true",
        help="fail if all tests, or those of a folder, take far more than their share of the time",
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Leave what a module of tests has left (caches of libraries, plans, compiled loops) out of the collections of the next."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def profiles(request: pytest.FixtureRequest) -> Iterator[KeptProfiles | None]:
    """Profile each model once for each shape: the same few are planned hundreds of times."""
    costs = sys.modules.get("headrace.model.costs.cost_profile")  # not there where no test that was collected imports it
    if costs is None:
        yield None
        return
    cache = getattr(request.config, "cache", None)  # pytest's own, which `make clean` removes and git ignores
    kept = KeptProfiles(costs.profile, cache.mkdir("profiles") if cache else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "profile", kept)
        if (planner := sys.modules.get("headrace.generate.passes.planner")) is not None:
            seats = KeptProfiles(planner.generation_costs, cache.mkdir("profiles") if cache else None, "seats")
            seats.exchanged = lambda: kept.exchanged()
            patch.setattr(planner, "Passes", partial(planner.Passes, costs=seats))
        yield kept


@pytest.fixture(scope="session", autouse=True)
def fresh_process() -> Iterator[None]:
    """A test's process grows from test to test: plans are for a process that is as large as that of a command."""
    place = sys.modules.get("headrace.ask.place")  # not there where no test that was collected imports it
    with pytest.MonkeyPatch.context() as patch:
        if place is not None:
            patch.setattr(place, "anonymous_bytes", lambda: 300 << 20)
        yield


@pytest.fixture(autouse=True)
def default_dtype_stays() -> Iterator[None]:
    """torch's default dtype belongs to the whole process: who leaves it changed fails, not the tests that come after."""
    yield
    found = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    assert found == torch.float32


@pytest.fixture(autouse=True)
def profiled_once(profiles: KeptProfiles | None, request: pytest.FixtureRequest) -> None:
    """What a test exchanges may change costs: those are no other test's."""
    if profiles is not None:
        patch = request.getfixturevalue("monkeypatch") if "monkeypatch" in request.fixturenames else None
        profiles.exchanged = lambda: [target for target, *_ in patch._setattr] if patch else []
