"""`train --stages` and `resume --stages`: the same command on each machine; stage 0 has the run, the others follow it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.cli.runs import Terminal, stops
from headrace.runs.prepare import default_output
from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import ConfigError
from headrace.terms.options.options import Options
from headrace.terms.options.run_options import RunOptions


def train_as_stage(
    words: Sequence[str], given: Mapping[str, Any], stages: str, stage: int | None, *, secret: Path | None, wait: float
) -> None:
    """Be a stage: 0 with the run that `words` and `given` describe, or another one, which needs an SSD directory alone.

    Raises:
        ConfigError: it is not clear which stage this is, or it has what belongs to another one.
    """
    from headrace.peers import Staging
    from headrace.peers import train_in_stages as lead

    staging = Staging.of(stages, stage, secret, wait)
    if staging.stage:
        _follow(given, staging)
        return
    if not words:
        raise ConfigError("stage 0 has the run; give RUN.YAML, or MODEL DATA")
    from headrace.cli.configuration import config_of
    from headrace.cli.first_look import look_at_choices, with_model_here

    config = config_of(words, given, RunOptions)
    look_at_choices(config)
    config = with_model_here(config)
    with stops(RunDirectory(Path(config.output or default_output(config)))):
        lead(config, staging, display=Terminal())


def resume_as_stage(run_directory: Path, stages: str, stage: int | None, secret: Path | None) -> None:
    """Be stage 0 of the run in `run_directory` again."""
    from headrace.peers import Staging
    from headrace.peers import resume_in_stages as lead

    with stops(RunDirectory(run_directory)):
        lead(run_directory, Staging.of(stages, stage, secret, 600.0), display=Terminal())


def _follow(given: Mapping[str, Any], staging: Any) -> None:
    from headrace.peers import WORKERS_OWN, follow_as_stage

    if others := sorted(set(given) - WORKERS_OWN):
        mine = ", ".join(sorted(WORKERS_OWN))
        raise ConfigError(f"{', '.join(others)}: the run comes from stage 0; only {mine} are this stage's own")
    if not given.get("ssd"):
        raise ConfigError("ssd: a stage keeps its part of the run there; give --ssd DIRECTORY")
    options = Options.of(given)
    options = replace(options, ssd=tuple(folder.absolute() for folder in options.budget.ssd))
    folder = options.budget.ssd[0]
    folder.mkdir(parents=True, exist_ok=True)
    with stops(RunDirectory(folder)):
        follow_as_stage(options, staging, display=Terminal())
