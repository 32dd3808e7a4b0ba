"""A ledger of the time that the tests of each folder take: a room that takes far more than its share of it fails the run.

Shares and not seconds: a slow machine is slow in all rooms. Time of processors and not of the clock: what else runs for a while
makes that room look slow which is at work then. Caches that are cold and processors that differ still move a room by a third,
so a room is named from its share on, and fails the run from `FAILS_AT` times its share on. Only `make test` asks for it.
"""

import resource
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

import pytest

# The most that each folder may take of the time of all tests, in percent: together some more than 100, as no two runs are the
# same, and at most `MOST_TOGETHER`. Who needs more takes it from another room, or marks tests `deep`.
MOST_TOGETHER = 130
FAILS_AT = 1.5  # times its share
MOST_PERCENT = {
    "ask": 12.3,
    "architectures": 0.2,
    "bench": 1,
    "cli": 8,
    "codec": 1.5,
    "compress": 12,
    "crash": 0.5,
    "data": 3,
    "demo": 0.5,
    "equivalence": 25,
    "generation": 13.5,
    "integrations": 2,
    "files": 0.5,
    "flow": 2,
    "gpu": 0.5,
    "local_steps": 1,
    "losses": 0.5,
    "machine": 0.5,
    "measure": 1.5,
    "memory": 0.5,
    "migrate": 0.5,
    "model": 11.5,
    "namespaces": 0.4,
    "net": 0.5,
    "packaging": 0.1,
    "plan": 13.5,
    "report": 2,
    "runs": 2,
    "serve": 1.5,
    "store": 2,
    "style": 4,
    "terms": 0.5,
    "update": 5,
}


def overspent(seconds: Mapping[str, float], most_percent: Mapping[str, float], times: float = 1) -> list[str]:
    """Return a line for each folder that took more than so many `times` its share, or has none."""
    total = sum(seconds.values()) or 1.0
    lines = []
    for folder, spent in sorted(seconds.items()):
        percent = 100 * spent / total
        if folder not in most_percent:
            lines.append(f"{folder} has no share: it took {percent:.1f} %; give it one in tests/time_ledger.py")
        elif percent > times * most_percent[folder]:
            lines.append(f"{folder} took {percent:.1f} % of {total:.0f} s, its share is {most_percent[folder]} %")
    return lines


def cpu_seconds() -> float:
    """Return what this process, and those that it started and waited for, have taken of processors."""
    used = (resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


class CpuClock:
    """A plugin for whoever runs tests: each report says the time of processors since the one before."""

    def __init__(self) -> None:
        self.last = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self.last = cpu_seconds()  # what was collected and imported before is no test's

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report = yield
        before, self.last = self.last, cpu_seconds()
        report.cpu_seconds = self.last - before
        return report


class TimeLedger:
    """A plugin that adds up what the tests of each folder take, shows it at the end, and fails a run that overspent by far."""

    def __init__(self, most_percent: Mapping[str, float]) -> None:
        self.seconds: Counter[str] = Counter()
        self.most_percent = most_percent

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[PurePosixPath(report.nodeid).parts[1]] += report.cpu_seconds

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and overspent(self.seconds, self.most_percent, FAILS_AT):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = sum(self.seconds.values()) or 1.0
        terminalreporter.section("CPU seconds of each folder, and its percentage of the whole")
        for folder, spent in self.seconds.most_common():
            terminalreporter.write_line(f"{folder:12} {spent:7.1f} s {100 * spent / total:5.1f} %")
        for line in overspent(self.seconds, self.most_percent):
            terminalreporter.write_line(f"TOO LONG: {line}", red=True)
