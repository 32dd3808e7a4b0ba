"""What a run decides about its rows before it begins: how many steps epochs are, and where completions begin."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training_fakes import FakeHost, Screen, run_options, write_data

from headrace.data.batches.open_data import open_stream
from headrace.files.yaml_options import from_yaml
from headrace.peers.meet.same_run import refuse_another_run
from headrace.runs import RunOptions, train
from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import RunDirectoryError
from headrace.terms.options.border import Border


def _notes(folder: Path, samples: int, **more: Any) -> tuple[list[str], int]:
    """Return what a run of so many rows in steps of eight says of its epochs, and its steps."""
    given = run_options(folder, measure=False, packing=False, tokens_per_step=8 * 32, **more)
    write_data(Path(given["data"]), samples)
    screen = Screen()
    done = train(RunOptions.of(given), display=screen, engines=FakeHost().engines())
    return [each for each in screen.said if each.startswith("note: epochs")], done.steps


@pytest.mark.parametrize(("epochs", "words"), [(0.5, "0.5 epochs take"), (1, "1 epoch take"), (2, "2 epochs take")])
def test_epochs_shorter_than_a_step_are_told_with_their_numbers(epochs: float, words: str, tmp_path: Path) -> None:
    (note,), steps = _notes(tmp_path, 3, epochs=epochs)
    assert steps == 1
    assert f"3 of the 8 rows of a step, so {words} 1 step, which are 2.67 epochs" in note


@pytest.mark.parametrize(("samples", "more"), [(8, {"epochs": 2}), (30, {"epochs": 0.5}), (3, {"max_steps": 2})])
def test_nothing_is_told_where_epochs_decide_or_were_not_asked(samples: int, more: dict[str, Any], tmp_path: Path) -> None:
    assert _notes(tmp_path, samples, **more)[0] == []


def _pairs(folder: Path, **more: Any) -> RunOptions:
    given = run_options(folder, max_steps=1, measure=False, packing=False, **more)
    rows = [{"prompt": f"water {n}", "chosen": " flows", "rejected": " stands"} for n in range(4)]
    Path(given["data"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunOptions.of(given)


@pytest.mark.parametrize(
    ("more", "written", "rule"),
    [
        ({"loss": "orpo"}, "joint", Border.CPO),
        ({"loss": "simpo", "border": "apart"}, "apart", Border.APART),
    ],
)
def test_a_run_writes_down_its_border(more: dict[str, Any], written: str, rule: Border, tmp_path: Path) -> None:
    train(_pairs(tmp_path, **more), engines=FakeHost().engines())
    config = from_yaml(tmp_path / "run" / "config.yaml")
    assert config.border == written
    assert open_stream(config).spec.border is rule


def test_a_run_that_began_without_a_choice_keeps_the_prompts_own_tokens(tmp_path: Path) -> None:
    train(_pairs(tmp_path, loss="simpo"), engines=FakeHost().engines())
    file = tmp_path / "run" / "config.yaml"
    lines = [line for line in file.read_text().splitlines() if not line.startswith("border")]
    file.write_text("\n".join(lines) + "\n")
    assert open_stream(from_yaml(file), resumed=True).spec.border is Border.APART


def test_another_border_is_another_run(tmp_path: Path) -> None:
    given = _pairs(tmp_path, loss="simpo", keep_state=True)
    train(given, engines=FakeHost().engines())
    run = RunDirectory(tmp_path / "run")
    refuse_another_run(run, replace(run.read_config(), border=None))
    with pytest.raises(RunDirectoryError, match="border apart here, joint there"):
        refuse_another_run(run, replace(run.read_config(), border="apart"))
