"""What `headrace plan` says of a run is what `headrace train` says of it, each in a process of its own.

Run: pytest tests/cli/test_plan_and_train.py
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bad_worlds import World

from headrace.cli import main
from headrace.files import describe_directory, space
from headrace.model import Checkpoint, export_bytes
from headrace.terms.sizes import format_bytes

MIB = 1 << 20


@pytest.mark.parametrize("runs", [("cold",), pytest.param(("cold", "warm"), marks=pytest.mark.deep)])
@pytest.mark.process
def test_what_libraries_take_is_one_figure(
    runs: tuple[str, ...], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For `plan`, for `train` that tokenises its data, and for `train` that finds them cached."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = world.train_words()
    step = ("--tokens-per-step", words[words.index("--tokens-per-step") + 1])
    step += ("--sequence-length", words[words.index("--sequence-length") + 1])
    figures = [row(json.loads(headrace("plan", str(world.model), *step, "--json"))["plan"])]
    for directory in runs:
        said = headrace(*world.train_words(output=tmp_path / directory, max_steps=1))
        check_order(said.splitlines())
        figures.append(row(json.loads((tmp_path / directory / "plan.json").read_text())))
    assert len(set(figures)) == 1, [f"{figure / MIB:.0f} MiB" for figure in figures]


def check_order(lines: list[str]) -> None:
    """A run says what it plans, then what it imports, then its steps."""
    places = [
        next(number for number, line in enumerate(lines) if line.startswith(words))
        for words in ("allowed", "info: importing", "step 1/1")
    ]
    assert places == sorted(places)
    assert lines[places[1]].endswith(" of weights")


def test_what_is_odd_and_no_error_is_said_before_the_first_step(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """A warm-up that does not end, and a dtype in the configuration that no weight has."""
    world.edit_config(dtype="float8_e4m3fn")
    with pytest.raises(SystemExit) as left:
        main(world.train_words("warmup_steps=5"))
    said = capsys.readouterr()
    assert not left.value.code, said.err
    before, steps, _ = said.out.partition("step 1/2")
    assert steps
    assert "config.json says float8_e4m3fn, the weights are BF16. " in before
    assert "warmup_steps: 5 steps of warm-up in a run of 2. The learning rate ends at 0.2 of what was asked" in before


def test_space_for_the_finished_model_is_counted_by_both(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was counted by `train` alone, after a plan that did without."""
    model_bytes = export_bytes(Checkpoint.open(world.model))
    described = replace(describe_directory(world.folder), free_bytes=9 * model_bytes)
    monkeypatch.setattr(space, "describe_directory", lambda directory: described)
    monkeypatch.chdir(world.folder)
    words = f"{format_bytes(8 * model_bytes)} may be used; free some space"
    assert words in world.train_refused()
    with pytest.raises(SystemExit):
        main(["plan", str(world.model), "--tokens-per-step", "64", "--sequence-length", "32"])
    assert words in capsys.readouterr().out


def row(plan: dict[str, Any]) -> int:
    return int(plan["placement"]["results"]["peak_bytes"]["host"]["runtime"])


def headrace(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "headrace", *words], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
