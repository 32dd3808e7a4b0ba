"""Tests that take more than they may are named, all together or those of a folder, on a slow machine as on a fast one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from time_ledger import MOST_PERCENT, MOST_TOGETHER, CpuClock, TimeLedger, overspent

TESTS = Path(__file__).parents[1]


def test_every_folder_has_a_share() -> None:
    folders = {path.parent.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/test_*.py")}
    assert folders == MOST_PERCENT.keys()
    assert 100 < sum(MOST_PERCENT.values()) <= MOST_TOGETHER
    assert MOST_PERCENT["equivalence"] <= 25


@pytest.mark.parametrize("speed", [0.01, 1, 50])
def test_shares_are_of_the_whole_and_not_seconds(speed: float) -> None:
    spent = {"engine": 70 * speed, "model": 30 * speed}
    assert overspent(spent, {"engine": 71, "model": 31}) == []
    (line,) = overspent(spent, {"engine": 71, "model": 29})
    assert line.startswith("model took 30.0 % of")
    (line,) = overspent(spent, {"engine": 71})
    assert "model has no share" in line


def test_a_run_that_overspends_says_so_and_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = session_of(tmp_path, a="pass", b="pass")
    for most, most_loops, named in ((100, 1e9, 0), (0, 1e9, 1), (100, 0, 1)):
        ledger = TimeLedger({"a": 100, "b": most}, most_loops)
        assert pytest.main(arguments, plugins=[ledger, CpuClock()]) == pytest.ExitCode.OK
        assert ledger.seconds.keys() == {"a", "b"}
        assert capsys.readouterr().out.count("TOO LONG") == named


@pytest.mark.parametrize("loop_seconds", [0.01, 0.1, 0.9])
def test_what_all_may_take_is_counted_in_loops_of_the_same_processor(loop_seconds: float) -> None:
    ledger = TimeLedger({"a": 100}, most_loops=100)
    for part in (0.25, 0.75):
        ledger.pytest_runtest_logreport(
            SimpleNamespace(nodeid="tests/a/it::test", cpu_seconds=part * 90 * loop_seconds, loop_seconds=loop_seconds)
        )
    assert ledger.loops == pytest.approx(90)


def test_waiting_is_not_counted_and_processes_that_were_started_are(tmp_path: Path) -> None:
    """Half a second of waiting costs less than a tenth of one of work, in this process or in another: a test itself costs the
    same in all three.
    """
    work = "import time; all(time.process_time() < 0.1 + start for start in [time.process_time()] for _ in iter(int, 1))"
    started = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}], check=True)"
    ledger = TimeLedger(dict.fromkeys(("waits", "works", "starts"), 100))
    arguments = session_of(tmp_path, waits="import time; time.sleep(0.5)", works=work, starts=started)
    assert pytest.main(arguments, plugins=[ledger, CpuClock()]) == pytest.ExitCode.OK
    least = min(ledger.seconds["works"], ledger.seconds["starts"])
    assert least >= 0.1
    assert ledger.seconds["waits"] < least


def session_of(folder: Path, **bodies: str) -> list[str]:
    """Return the arguments of a session of one test in each of some folders, which does what is said.

    Names are not to be those of another session: modules stay imported.
    """
    for name, body in bodies.items():
        (folder / "tests" / name).mkdir(parents=True)
        (folder / "tests" / name / f"test_{name}.py").write_text(f"def test_it():\n    {body}\n")
    more = ["--confcutdir", str(folder), "--import-mode=importlib", "-p", "no:cacheprovider"]
    return ["--rootdir", str(folder), *more, str(folder / "tests")]
