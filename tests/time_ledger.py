"""A ledger of the time that tests take. It names, at a run's end, the folders that took more than their share, and says whether
all tests took more than they may together. It fails no run: processors differ in which work is slow on them, and kernels that
are not yet compiled count as the tests that come first.

Loops and shares, not seconds: a slow machine is slow in its loops (`cpu_work.a_loop`) and in all rooms. Time of processors and
not of the clock: what else runs for a while makes that room look slow which is at work then. It comes with
`make test LEDGER=1` alone.
"""

import resource
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

import pytest
from cpu_work import a_loop, seconds_of

# The most that all tests may take, in loops: some six minutes of two ordinary cores, but for collecting tests, and waiting.
# What is more is marked `wide`.
MOST_LOOPS = 7000
LOOP_AFTER_SECONDS = 8.0  # of processors: as often is a loop timed

# The most that each folder may take of the time of all tests, in percent: together some more than 100, as no two runs are the
# same, and at most `MOST_TOGETHER`. Who needs more takes it from another room, or marks tests `wide`.
MOST_TOGETHER = 130
MOST_PERCENT = {
    "apps": 2.5,
    "ask": 7.5,
    "architectures": 0.2,
    "bench": 1.5,
    "cli": 9,
    "codec": 2,
    "compress": 7.5,
    "crash": 0.5,
    "data": 6,
    "demo": 0.5,
    "equivalence": 24,
    "generation": 18,
    "integrations": 2,
    "files": 1,
    "flow": 1,
    "gpu": 0.5,
    "local_steps": 1.5,
    "losses": 0.7,
    "machine": 0.5,
    "measure": 1.5,
    "memory": 0.7,
    "migrate": 0.5,
    "model": 10.5,
    "mutants": 0.1,
    "namespaces": 0.4,
    "net": 0.5,
    "packaging": 0.1,
    "plan": 15,
    "report": 0.5,
    "runs": 4.5,
    "serve": 1.5,
    "store": 2,
    "style": 0.5,
    "terms": 0.8,
    "update": 4.5,
}


def overspent(seconds: Mapping[str, float], most_percent: Mapping[str, float]) -> list[str]:
    """Return a line for each folder that took more than its share, or has none."""
    total = sum(seconds.values()) or 1.0
    lines = []
    for folder, spent in sorted(seconds.items()):
        percent = 100 * spent / total
        if folder not in most_percent:
            lines.append(f"{folder} has no share: it took {percent:.1f} %; give it one in tests/time_ledger.py")
        elif percent > most_percent[folder]:
            lines.append(f"{folder} took {percent:.1f} % of {total:.0f} s, its share is {most_percent[folder]} %")
    return lines


def cpu_seconds() -> float:
    """Return what this process, and those that it started and waited for, have taken of processors."""
    used = (resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


class CpuClock:
    """A plugin for whoever runs tests: each report says the time of processors since the one before, and what a loop takes."""

    def __init__(self) -> None:
        self.last = 0.0
        self.looped_at = self.loop_seconds = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        if not self.loop_seconds or cpu_seconds() > self.looped_at + LOOP_AFTER_SECONDS:
            self.loop_seconds, self.looped_at = seconds_of(a_loop), cpu_seconds()
        self.last = cpu_seconds()  # what was collected and imported before is no test's

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report = yield
        before, self.last = self.last, cpu_seconds()
        report.cpu_seconds, report.loop_seconds = self.last - before, self.loop_seconds
        return report


class TimeLedger:
    """A plugin that adds up what the tests of each folder take, and shows it at the end."""

    def __init__(self, most_percent: Mapping[str, float], most_loops: float = MOST_LOOPS) -> None:
        self.seconds: Counter[str] = Counter()
        self.loops = 0.0
        self.most_percent, self.most_loops = most_percent, most_loops

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[PurePosixPath(report.nodeid).parts[1]] += report.cpu_seconds
        self.loops += report.cpu_seconds / report.loop_seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = sum(self.seconds.values()) or 1.0
        terminalreporter.section("CPU seconds of each folder, and its percentage of the whole")
        for folder, spent in self.seconds.most_common():
            terminalreporter.write_line(f"{folder:12} {spent:7.1f} s {100 * spent / total:5.1f} %")
        terminalreporter.write_line(f"{'all':12} {total:7.1f} s, {self.loops:.0f} loops of at most {self.most_loops}")
        for line in overspent(self.seconds, self.most_percent):
            terminalreporter.write_line(f"TOO LONG: {line}", red=True)
        if self.loops > self.most_loops:
            terminalreporter.write_line("TOO LONG: all tests together; mark some `wide` (CONTRIBUTING.md)", red=True)
