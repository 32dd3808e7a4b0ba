"""`headrace report` from outside: page, JSON, trace, refusals.

Run: pytest tests/cli/test_cli_report.py
"""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from forked import run_headrace
from tiers import sampled

from headrace.cli import main
from headrace.report import MetricsFile
from headrace.report.lanes import LanesFile
from headrace.terms.events import OpDone, StepResult


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    metrics, lanes = MetricsFile(directory / "metrics.jsonl"), LanesFile(directory)
    place = {"unit": 1, "micro": 0, "chunk": -1, "bytes": 0}
    for step in (1, 2, 3):
        lanes(
            OpDone(
                step=step, label="forward", verb="forward", lane="compute", start_seconds=step, stop_seconds=step + 0.5, **place
            )
        )
        metrics(StepResult(step=step, loss=1.0, grad_norm=1.0, learning_rate=1e-5, tokens=10, trained_tokens=10, seconds=1.0))
    metrics.close()
    lanes.close()
    return directory


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return int(left.value.code or 0)


def test_it_writes_the_page_and_says_where(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("report", run_directory) == 0
    assert capsys.readouterr().out == f"wrote {run_directory / 'report.html'}\n"
    assert (run_directory / "report.html").read_text().startswith("<!doctype html>")


def test_out_and_trace_name_their_files(run_directory: Path, tmp_path: Path) -> None:
    assert run("report", run_directory, "--out", tmp_path / "a.html", "--trace", tmp_path / "b.json") == 0
    assert (tmp_path / "a.html").exists()
    assert not (run_directory / "report.html").exists()
    assert sum(entry["ph"] == "X" for entry in json.loads((tmp_path / "b.json").read_text())) == 2


def test_a_picture_of_a_step_stands_alone(run_directory: Path, tmp_path: Path) -> None:
    assert run("report", run_directory, "--svg", tmp_path / "step.svg") == 0
    drawn = ElementTree.fromstring((tmp_path / "step.svg").read_text(encoding="utf-8"))
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    fills = [each.get("fill") for each in drawn]
    assert "#ffffff" in fills, "on white, whatever is below"
    assert all(each.get("class") is None for each in drawn), "colours that need a style sheet"
    assert any("Compute" in (each.text or "") for each in drawn)


def test_json_is_all_there_is_on_stdout(run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("report", run_directory, "--json") == 0
    assert json.loads(capsys.readouterr().out)["bottleneck"] == "compute"
    assert not (run_directory / "report.html").exists()
    assert run("report", run_directory, "--json", "--out", tmp_path / "a.html") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3


@pytest.mark.parametrize("options", [[], ["--json"], ["--trace", "t.json"]])
def test_what_is_no_run_is_refused_in_one_line(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("report", tmp_path, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", sampled(["--svg", "--trace", "--out"]))
def test_what_goes_to_stdout_is_all_there_is_on_it(option: str, run_directory: Path) -> None:
    done = run_headrace("report", run_directory, option, "/dev/stdout")
    assert done.returncode == 0, done.stderr
    assert "wrote" not in done.stdout
    assert "wrote /dev/stdout" in done.stderr
    assert done.stdout.rstrip().endswith({"--out": "</html>", "--trace": "]", "--svg": "</svg>"}[option])
