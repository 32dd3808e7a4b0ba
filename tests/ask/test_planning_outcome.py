"""Planned against measured: what stands for a step, what is missing, and what the table says.

Run: pytest tests/ask/test_planning_outcome.py
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned_models import llama_small, saved

from headrace.ask.answer import plan_model, report_of
from headrace.ask.outcome import run_outcome_of
from headrace.ask.plan_report import PlanReport
from headrace.plan.clock.machine_profiles import load_profile
from headrace.terms.options.options import Options
from headrace.update import rule_of
from headrace.update.rules.adamw import AdamW


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> PlanReport:
    model = saved(tmp_path_factory.mktemp("models") / "small", llama_small())
    rig = load_profile("rtx4090-1ssd")
    return plan_model(model, Options(machine=rig, tokens_per_step=1024, sequence_length=512, max_steps=10), here=False)


def record(seconds: float, **changes: Any) -> dict[str, Any]:
    values = {
        "seconds": seconds,
        "tokens_per_second": 1024 / seconds,
        "bytes_read": {"ssd": 1000},
        "bytes_written": {"ssd": 500},
        "peak_bytes": {"host": 700, "device": 300},
    }
    return values | changes


def rows(report: PlanReport, records: list[dict[str, Any]]) -> dict[str, Any]:
    return run_outcome_of(report, records).to_json()["planned_and_measured"]


@pytest.mark.wide
def test_the_first_step_counts_for_peaks_only(report: PlanReport) -> None:
    first = record(90.0, peak_bytes={"host": 900, "device": 300}, bytes_read={"ssd": 10**9})
    found = rows(report, [first, record(1.0), record(2.0), record(4.0)])
    assert report.plan is not None
    assert report.forecast is not None
    assert found["host_peak_bytes"]["measured"] == 900
    assert found["host_peak_bytes"]["planned"] == report.plan.peak("host")
    assert found["step_seconds"]["measured"] == 2.0
    assert found["tokens_per_second"]["measured"] == 512
    assert found["ssd_bytes_read_per_step"]["measured"] == 1000
    assert found["step_seconds"]["ratio"] == 2.0 / report.forecast.step_seconds
    assert found["ssd_bytes_written_per_step"]["planned"] == report.forecast.ssd_bytes_written_per_step


@pytest.mark.wide
def test_a_node_has_peaks_beside_its_plan_and_no_forecast(report: PlanReport) -> None:
    assert report.plan is not None
    node = report_of(replace(report.plan, serves=True), None, model="small", num_steps=1)
    outcome = run_outcome_of(node, [record(1.0)])
    found = outcome.to_json()["planned_and_measured"]
    assert found["host_peak_bytes"]["ratio"] == 700 / report.plan.peak("host")
    assert (found["step_seconds"]["planned"], found["step_seconds"]["measured"]) == (None, 1.0)
    assert "nominal" not in outcome.explain(), "no time was planned for any machine"


def test_the_hosts_peak_is_that_of_the_whole_process(report: PlanReport) -> None:
    records = [record(1.0, peak_bytes={"host": 700, "device": 300})]
    for whole, expected in ((600, 700), (800, 800)):
        found = run_outcome_of(report, records, host_peak_bytes=whole).to_json()["planned_and_measured"]
        assert found["host_peak_bytes"]["measured"] == expected
        assert found["device_peak_bytes"]["measured"] == 300


def test_of_a_single_step_there_is_nothing_else(report: PlanReport) -> None:
    assert rows(report, [record(90.0)])["step_seconds"]["measured"] == 90.0


@pytest.mark.wide
def test_bytes_are_a_mean_because_commits_may_come_seldom(report: PlanReport) -> None:
    steps = [record(1.0), *(record(1.0, bytes_written={"ssd": size}) for size in (0, 0, 300))]
    assert rows(report, steps)["ssd_bytes_written_per_step"]["measured"] == 100


def test_what_was_not_measured_is_null_and_a_dash(report: PlanReport) -> None:
    outcome = run_outcome_of(report, [record(1.0, peak_bytes={"host": 700}), record(1.0, peak_bytes={}, skipped="overflow")])
    found = outcome.to_json()["planned_and_measured"]
    assert found["ssd_peak_bytes"]["measured"] is found["device_peak_bytes"]["ratio"] is None
    table = {line[:20].strip(): line[20:].split() for line in outcome.explain().splitlines()}
    assert table["peak, device"][-2:] == ["-", "-"]
    assert table["peak, host"][-3:-1] == ["700", "B"]
    assert "1 of them skipped" in outcome.explain()


def test_a_fast_run_is_told_without_powers_of_ten(report: PlanReport) -> None:
    table = run_outcome_of(report, [record(0.01), record(0.01)]).explain()
    assert "102400" in table
    assert report.forecast
    fast = replace(report, forecast=replace(report.forecast, step_seconds=report.forecast.step_seconds / 1e4))
    (time,) = (line for line in fast.explain().splitlines() if line.startswith("time"))
    assert "e+" not in time


def test_columns_are_aligned(report: PlanReport) -> None:
    lines = run_outcome_of(report, [record(1.0), record(2.0)]).explain().splitlines()
    # One line for words at the end.
    assert {len(line) for line in lines[:-1]} == {len(lines[0])}


def test_the_report_of_a_plan_is_the_one_it_came_with(report: PlanReport) -> None:
    assert report.plan is not None
    rig = load_profile("rtx4090-1ssd")
    again = report_of(report.plan, rig, model=report.model, num_steps=10)
    report = replace(report, alternatives=())  # what else would do is for `headrace plan` to say
    assert again.explain() == report.explain()
    assert again.to_json() == report.to_json()


def test_a_run_with_smaller_moments_says_so_as_its_plan_does(report: PlanReport) -> None:
    assert report.plan is not None
    plan = replace(report.plan, rule=rule_of(AdamW(moments="int8"), "bfloat16").figures)
    again = report_of(plan, load_profile("rtx4090-1ssd"), model=report.model, num_steps=10)
    assert again.to_json()["rule"] == "AdamW with int8 moments"
    assert "int8 moments" in again.explain()


def test_for_a_machine_that_nobody_measured_the_table_says_so(tmp_path: Path) -> None:
    model = saved(tmp_path / "small", llama_small())
    found = plan_model(model, Options(host_memory="8GiB", ssd=[tmp_path], tokens_per_step=512, sequence_length=256))
    assert "headrace bench machine" in run_outcome_of(found, [record(1.0)]).explain()
