"""`plan --stages`: each stage plans its own blocks, a step is that of the virtual clock, and cuts carry 4 T h bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
from planned_models import llama_small, saved
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.peers.stages.planning import plan_stages
from headrace.peers.stages.report import StagesReport
from headrace.terms.errors import ConfigError
from headrace.terms.options.plan_options import PlanOptions

ROWS, LENGTH = 8, 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("stages") / "model", llama_small())


def options_of(**more: Any) -> PlanOptions:
    given = {"machine": "rtx4090", "stages": 2, "link": "100Mbit", "tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH}
    return PlanOptions.of({**given, **more})


@pytest.fixture(scope="module")
def found(model: Path) -> StagesReport:
    return plan_stages(str(model), options_of(), here=False)


@pytest.mark.wide
def test_a_step_is_as_long_as_the_slowest_stage_and_the_way_through_all(found: StagesReport) -> None:
    assert found.fits
    slowest = max(each.group_seconds for each in found.stages)
    through = sum(each.group_seconds + found.transfer_seconds * 2 for each in found.stages) - 2 * found.transfer_seconds
    assert found.step_seconds >= max(found.groups * slowest, through) * 0.999
    assert 0 < found.utilisation <= found.bound * 1.001
    assert found.tokens_per_second == pytest.approx(ROWS * LENGTH / found.step_seconds)


@pytest.mark.wide
def test_a_cut_carries_four_bytes_a_token_and_number_of_a_hidden_state(model: Path, found: StagesReport) -> None:
    hidden = llama_small().hidden_size
    assert found.cut_bytes == 4 * ROWS * LENGTH * hidden
    assert found.transfer_seconds == pytest.approx(found.cut_bytes / 2 / found.groups / 12.5e6)


def test_stages_share_out_the_models_blocks_and_parameters(found: StagesReport) -> None:
    blocks = [block for each in found.stages for block in each.place.blocks]
    assert blocks == list(range(1, llama_small().num_hidden_layers + 1))
    assert sum(each.parameters for each in found.stages) == found.stages[0].report.parameters
    assert [each.choices.groups for each in found.stages] == [found.groups] * 2
    assert {each.found.batch.micro_batch_sequences for each in found.stages} == {
        found.stages[0].found.batch.micro_batch_sequences
    }


def test_the_report_is_printed_as_text_and_as_json(found: StagesReport) -> None:
    text, values = found.explain(), json.loads(json.dumps(found.to_json()))
    assert "2 x rtx4090, links of 100 Mbit/s each way" in text
    assert "(S-1)(t + 2c)" in text
    assert "AxoNN" in text
    assert values["fits"] is True
    assert [each["blocks"] for each in values["stages"]] == [
        [each.place.blocks.start - 1, each.place.blocks.stop - 1] for each in found.stages
    ]


@pytest.mark.deep
def test_faster_machines_get_more_blocks_and_eight_bits_halve_what_crosses(model: Path, found: StagesReport) -> None:
    unlike = plan_stages(str(model), options_of(stages="rtx4090,rtx3080", stage_dtype="int8"), here=False)
    assert len(unlike.stages[0].place.blocks) > len(unlike.stages[1].place.blocks)
    assert unlike.cut_bytes < 0.52 * found.cut_bytes + 8 * ROWS * LENGTH
    assert "rtx3080" in unlike.explain()
    with pytest.raises(ConfigError, match="give the first block"):
        plan_stages(str(model), options_of(cuts=[1, 2]), here=False)


@pytest.mark.deep
def test_a_stage_that_does_not_fit_is_named(model: Path) -> None:
    found = plan_stages(str(model), options_of(host_memory="320MiB"), here=False)
    assert not found.fits
    assert "stage 0" in found.explain()
    assert found.to_json()["step_seconds"] is None


def test_what_stages_cannot_do_is_refused_by_name(model: Path) -> None:
    for wrong, words in (
        ({"machine": None}, "a plan needs the machine of a stage"),
        ({"stages": 1}, "makes one stage"),
        ({"gradient_sum": "tree"}, "leave tree out"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan_stages(str(model), options_of(**wrong), here=False)
    with pytest.raises(ConfigError, match="ranks and stages"):
        options_of(ranks=2)


@pytest.mark.deep
def test_the_command_plans_stages(model: Path) -> None:
    words = ["plan", str(model), "--machine", "rtx4090", "--stages", "2", "--link", "1Gbit", "--sequence-length", str(LENGTH)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "groups in flight" in result.output
