"""A folder whose tests take more than their share of the time fails the run, on a slow machine as on a fast one."""

from pathlib import Path

import pytest
from time_ledger import MOST_PERCENT, TimeLedger, overspent

TESTS = Path(__file__).parents[1]


def test_every_folder_has_a_share() -> None:
    folders = {path.parent.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/test_*.py")}
    assert folders == MOST_PERCENT.keys()
    assert 100 < sum(MOST_PERCENT.values()) < 250


@pytest.mark.parametrize("speed", [0.01, 1, 50])
def test_shares_are_of_the_whole_and_not_seconds(speed: float) -> None:
    spent = {"engine": 70 * speed, "model": 30 * speed}
    assert overspent(spent, {"engine": 71, "model": 31}) == []
    (line,) = overspent(spent, {"engine": 71, "model": 29})
    assert line.startswith("model took 30.0 % of")
    (line,) = overspent(spent, {"engine": 71})
    assert "model has no share" in line


def test_a_run_that_overspends_fails(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / f"test_{folder}.py").write_text("def test_it():\n    pass\n")
    arguments = ["--rootdir", str(tmp_path), "--confcutdir", str(tmp_path), "--import-mode=importlib", "-p", "no:cacheprovider"]
    for most, code in ((100, pytest.ExitCode.OK), (0, pytest.ExitCode.TESTS_FAILED)):
        ledger = TimeLedger({"a": 100, "b": most})
        assert pytest.main([*arguments, str(tmp_path / "tests")], plugins=[ledger]) == code
        assert ledger.seconds.keys() == {"a", "b"}
