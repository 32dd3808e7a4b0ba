"""A row of the table is all that a command needs: a third code is compressed by its own codec, planned by its own figures."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressing import options, run, write_data
from safetensors.torch import load_file

from headrace.cli.app import main
from headrace.codec.table import CODES
from headrace.codec.targets import Int4Target
from headrace.compress.planner import plan_compression
from headrace.compress.run import compress_model
from headrace.generate.passes.asked import plan_generation
from headrace.plan.clock.machine_profiles import load_profile
from headrace.terms.errors import ConfigError
from headrace.terms.options.generate_options import GenerateOptions


class Marked(Int4Target):
    """Four bits whose description says that another target wrote it."""

    def describe(self, groups: Any, ignored: Any) -> dict[str, Any]:
        return super().describe(groups, ignored) | {"marked": self.group_size}


THIRD = dataclasses.replace(
    CODES["int4"], name="third", kind="third", bits=11.0, target=Marked, decoded_per_second=7e7, on_all_cores=False
)
READ = dataclasses.replace(THIRD, target=None)
COUNTS = {"prompts": 1, "prompt_length": 8, "new_tokens": 4}


def of_compress(model: Path, folder: Path, name: str) -> None:
    compress_model(options(model, folder, to=name))


def of_plan(model: Path, folder: Path, name: str) -> None:
    plan_compression(model, name, "rtx4090-1ssd")


def of_generation(model: Path, folder: Path, name: str) -> None:
    plan_generation(str(model), GenerateOptions(), load_profile("rtx4090-1ssd"), here=False, compress=name, **COUNTS)


WAYS = (of_compress, of_plan, of_generation)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["int8", "INT4", "int4 ", "third", "fp8", "pack", ""])
def test_no_name_is_taken_for_another_code(way: Callable[..., None], name: str, dense: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r": expected int4 or ternary or sparse50 or bf16x12, found "):
        way(dense, tmp_path, name)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", WAYS)
def test_what_is_only_read_is_refused_as_that(
    way: Callable[..., None], dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CODES, "third", READ)
    with pytest.raises(ConfigError, match="found third, which is only read"):
        way(dense, tmp_path, "third")


@pytest.mark.parametrize(
    "words",
    [
        ["compress", "{model}", "{out}", "--to", "int8", "--data", "{data}"],
        ["plan", "{model}", "--compress", "int8", "--machine", "rtx4090-1ssd"],
        ["plan", "{model}", "--generate", "--compress", "int8", "--machine", "rtx4090-1ssd"],
    ],
)
def test_the_command_line_refuses_in_one_line(
    words: list[str], dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"model": dense, "out": tmp_path / "out", "data": write_data(tmp_path / "data.jsonl", samples=4)}
    with pytest.raises(SystemExit) as exit_:
        main([word.format(**places) for word in words])
    said = capsys.readouterr().err
    assert exit_.value.code == 2
    assert "expected int4 or ternary or sparse50 or bf16x12, found 'int8'" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_third_row_is_compressed_by_its_own_target(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODES, "third", THIRD)
    run(dense, tmp_path, to="third")
    described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert described["marked"] == 32
    stored = {key for file in (tmp_path / "out").glob("*.safetensors") for key in load_file(file)}
    assert any(key.endswith("weight_packed") for key in stored)


@pytest.mark.wide
def test_a_third_row_is_planned_by_its_own_figures(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODES, "third", THIRD)
    found = plan_compression(dense, "third", "rtx4090-1ssd")
    assert found.result_bytes["third matrices"] == found.coded_parameters * 11 // 8
    machine = dataclasses.replace(load_profile("rtx4090-1ssd"), has_device=False, device_memory_bytes=0)
    plan = plan_generation(str(dense), GenerateOptions(), machine, here=False, compress="third", **COUNTS)
    (kind, weights), *more = plan.units[1].decodes
    assert (kind, more) == ("third", [])
    assert plan.units[1].making_like == round(machine.make_bytes_per_second * weights / 7e7)
    measured = dataclasses.replace(machine, decoded_per_second={"third": 7e6})
    again = plan_generation(str(dense), GenerateOptions(), measured, here=False, compress="third", **COUNTS)
    assert again.units[1].making_like == pytest.approx(10 * plan.units[1].making_like)
    assert torch.tensor(plan.units[1].stored_bytes) > 11 * weights / 8
