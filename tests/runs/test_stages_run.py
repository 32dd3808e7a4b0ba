"""A run in stages that is started again is the same run, or another one's directory is named, before stages meet."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training_fakes import run_options

from headrace.peers.meet.address import Address
from headrace.peers.stages.run import Staging, train_in_stages
from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import ConfigError, RunDirectoryError
from headrace.terms.options.run_options import RunOptions


class Met(Exception):
    """The stages would meet now."""


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> Staging:
    def meeting(self: Staging) -> Any:
        raise Met

    monkeypatch.setattr(Staging, "meeting", meeting)
    return Staging(addresses=(Address("127.0.0.1", 1), Address("127.0.0.1", 2)), stage=0)


@pytest.fixture
def config(tmp_path: Path) -> RunOptions:
    found = RunOptions.of({**run_options(tmp_path, max_steps=3), "output": tmp_path / "run"})
    return replace(found, model=found.model.absolute())


def test_another_run_is_not_taken_for_this_one(config: RunOptions, staging: Staging) -> None:
    directory = RunDirectory(Path(str(config.output)))
    with pytest.raises(Met):
        train_in_stages(config, staging)
    directory.write_config(config)
    with pytest.raises(Met):
        train_in_stages(config, staging)
    with pytest.raises(RunDirectoryError, match=r"learning_rate 0[.]5 here"):
        train_in_stages(replace(config, learning_rate=0.5), staging)


def test_what_stages_cannot_do_is_refused_before_they_meet(config: RunOptions, staging: Staging) -> None:
    with pytest.raises(ConfigError, match="gradient_sum"):
        train_in_stages(replace(config, gradient_sum="tree"), staging)
