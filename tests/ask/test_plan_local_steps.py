"""`headrace plan --local-steps`: what a round computes and moves follows from the plan of a learner and the link alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from planned_models import llama_small, saved
from typer.testing import CliRunner

from headrace.ask.answer import plan_model
from headrace.ask.local_rounds import LocalReport
from headrace.ask.plan_report import PlanReport
from headrace.cli.app import app
from headrace.terms.errors import ConfigError
from headrace.terms.options.plan_options import PlanOptions


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(tmp_path / "model", llama_small())


def report_of(model: Path, plan: PlanReport | None = None, **more: Any) -> LocalReport:
    options = PlanOptions.of({"machine": "rtx4090-1ssd", "sequence_length": 128, "local_steps": 100, **more})
    return LocalReport.of(plan or plan_model(model, options, here=False), options)


@pytest.mark.wide
def test_a_round_moves_what_is_trained_once_each_way(model: Path) -> None:
    whole = report_of(model, link="10Mbit")
    plan = whole.plan
    assert whole.numbers == whole.plan.parameters
    assert whole.way_bytes == 2 * whole.numbers
    assert whole.exchange_seconds == pytest.approx(2 * 8 * whole.way_bytes / 10e6)
    computing = 100 * whole.step_seconds
    assert whole.busy_share == pytest.approx(computing / (computing + whole.exchange_seconds))
    more = report_of(model, plan, link="10Mbit", local_steps=whole.least_steps)
    assert more.busy_share >= 0.9
    assert report_of(model, plan, link="10Mbit", local_steps=max(1, whole.least_steps - 1)).busy_share < 0.9
    narrow = report_of(model, plan, link="10Mbit", exchange_dtype="int8")
    assert 1.0 <= narrow.way_bytes / narrow.numbers <= 1.01
    assert "100 local steps in" in whole.explain()
    assert "at 10 Mbit/s" in whole.explain()
    assert whole.to_json()["link_bytes_per_second"] == 1.25e6


@pytest.mark.deep
def test_adapters_travel_alone_and_subspaces_are_merged_first(model: Path) -> None:
    lora, subspace = report_of(model, adapter="lora:rank=4"), report_of(model, gradient="lsp")
    assert 0 < lora.numbers < lora.plan.parameters / 10
    assert subspace.numbers == subspace.plan.parameters


@pytest.mark.deep
def test_the_command_takes_the_options_of_a_node(model: Path) -> None:
    words = ["plan", str(model), "--machine", "rtx4090", "--sequence-length", "128", "--local-steps", "50"]
    found = json.loads(CliRunner().invoke(app, [*words, "--link", "1Gbit", "--json"]).output)
    assert found["link_bytes_per_second"] == 1.25e8
    assert found["fits"]
    assert found["without_effect"] == []


def test_what_says_nothing_without_local_steps_is_refused() -> None:
    for more, words in (
        ({"exchange_dtype": "int8"}, "exchange_dtype: given without local_steps"),
        ({"local_steps": 5, "workers": 2}, "local_steps and workers: .* give one of them"),
        ({"local_steps": 5, "nodes": 2}, "nodes: given without workers"),
    ):
        with pytest.raises(ConfigError, match=words):
            PlanOptions.of(more)
