"""`train` and `resume`: from words to a `RunOptions`, and a run shown on this terminal.

With `--stages` it is the same command on each machine: stage 0 has the run, the others follow it.

Invariant: options win over key=value words, and these win over the YAML file.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace.cli.plain_errors import INTERRUPTED, leave, leave_failed_step, leave_lost_rank, places_plainly
from headrace.cli.screen import show
from headrace.cli.streams import StdoutLost
from headrace.files.yaml_options import read_yaml
from headrace.report import LineProgress, LiveProgress, Reporter
from headrace.runs import Interrupted, RunDirectory, RunOptions, resume, train
from headrace.runs.job import default_output
from headrace.terms.errors import ConfigError, PeerLost, StepFailed
from headrace.terms.launch import Launch
from headrace.terms.options.options import Options
from headrace.terms.options.run_options import NodeOptions


class Terminal:
    """Shows a run on stdout: a live line on a terminal, plain lines elsewhere."""

    def say(self, text: str) -> None:
        """Print `text`."""
        show(text)

    def progress(self, total_steps: int) -> Reporter:
        """Return the progress of a run."""
        console = Console()
        # Not `is_terminal`, because colour may be forced where there is no terminal, and some terminals cannot overwrite a
        # line.
        live = sys.stdout.isatty() and not console.is_dumb_terminal
        return LiveProgress(console, total_steps) if live else LineProgress(sys.stdout, total_steps)


def start(config: RunOptions, launch: Launch | None = None) -> None:
    """Train, as rank 0 if torchrun has started several; a stop signal ends the process with 130 or 143."""
    with stops(RunDirectory(Path(config.output or default_output(config)))), places_plainly(lambda: vars(config).values()):
        if launch is None:
            train(config, display=Terminal())
        else:
            from headrace.peers import train_in_ranks

            train_in_ranks(config, launch, display=Terminal())


def serve_run(config: NodeOptions) -> None:
    """Be the node of a run; a stop signal ends the process with 130 or 143."""
    from headrace.peers import serve

    terminal = Terminal()
    with stops(RunDirectory(Path(config.output or default_output(config)))), places_plainly(lambda: vars(config).values()):
        serve(config, display=terminal, listening=lambda address: terminal.say(f"listening at {address}"))


def work_for(node: str, words: Sequence[str], options: Mapping[str, Any], *, wait_seconds: float, secret: Path | None) -> None:
    """Compute for the run of the node at `node`. Only the options that belong to this process may be given. A RUN.YAML may be
    given, too: its budgets are used here, and options that affect results must match the node's.

    Raises:
        ConfigError: other options are given, or one differs.
    """
    from headrace.peers import WORKERS_OWN, Address, deciding_options, read_secret, work

    is_file = len(words) == 1 and Path(words[0]).suffix in (".yaml", ".yml")
    others = [*(() if is_file else words), *sorted(set(options) - WORKERS_OWN)]
    if others:
        mine = ", ".join(sorted(WORKERS_OWN))
        raise ConfigError(f"node: {', '.join(others)}: a worker's run comes from the node; only {mine} are its own")
    asked = read_yaml(Path(words[0])) if is_file else {}
    own = {key: value for key, value in asked.items() if key in WORKERS_OWN} | dict(options)
    name = f"{socket.gethostname()}, process {os.getpid()}"
    work(
        Address.of(node, key="node"),
        Options.of(own),
        name=name,
        asked=deciding_options(asked, words[0]) if is_file else {},
        display=Terminal(),
        secret=read_secret(secret),
        wait_seconds=wait_seconds,
        model=Path(asked["model"]) if "model" in asked else None,
    )


def go_on(run_directory: Path, launch: Launch | None = None) -> None:
    """Resume, as rank 0 if torchrun has started several; a stop signal ends the process with 130 or 143."""
    run = RunDirectory(run_directory)
    if run.config.exists() and isinstance(config := run.read_config(), NodeOptions):
        serve_run(config)
        return
    with stops(run), places_plainly(lambda: vars(run.read_config()).values()):
        if launch is None:
            resume(run_directory, display=Terminal())
        else:
            from headrace.peers import resume_in_ranks

            resume_in_ranks(run_directory.absolute(), launch, display=Terminal())


def train_as_stage(
    words: Sequence[str], given: Mapping[str, Any], stages: str, stage: int | None, *, secret: Path | None, wait: float
) -> None:
    """Be a stage: 0 with the run that `words` and `given` describe, or another one, which needs an SSD directory alone.

    Raises:
        ConfigError: it is not clear which stage this is, or it has what belongs to another one.
    """
    from headrace.peers import Staging, train_in_stages

    staging = Staging.of(stages, stage, secret, wait)
    if staging.stage:
        _follow_as_stage(given, staging)
        return
    if not words:
        raise ConfigError("stage 0 has the run; give RUN.YAML, or MODEL DATA")
    from headrace.cli.configuration import config_of
    from headrace.cli.first_look import look_at_choices, with_model_here

    config = config_of(words, given, RunOptions)
    look_at_choices(config)
    config = with_model_here(config)
    with stops(RunDirectory(Path(config.output or default_output(config)))):
        train_in_stages(config, staging, display=Terminal())


def resume_as_stage(run_directory: Path, stages: str, stage: int | None, secret: Path | None) -> None:
    """Be stage 0 of the run in `run_directory` again."""
    from headrace.peers import Staging, resume_in_stages

    with stops(RunDirectory(run_directory)):
        resume_in_stages(run_directory, Staging.of(stages, stage, secret, 600.0), display=Terminal())


def _follow_as_stage(given: Mapping[str, Any], staging: Any) -> None:
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


@contextlib.contextmanager
def stops(run: RunDirectory) -> Iterator[None]:
    """End the process as shells expect it, with a word about how to go on if anything can go on."""
    try:
        yield
    except Interrupted as stop:
        leave(str(stop), stop.exit_code)
    except StdoutLost as error:  # if nothing was begun, or all is done, nothing can go on
        raise run.unwritable(error) if run.config.exists() and not run.final.exists() else error from error
    except PeerLost as lost:
        leave_lost_rank(lost, run.path)
    except StepFailed as error:
        leave_failed_step(error, run.path)
    except KeyboardInterrupt:  # before the first step, or while the model is written
        how = f"resume with: headrace resume {run.path}" if run.config.exists() else "nothing was begun"
        leave(f"interrupted; {how}", INTERRUPTED)
