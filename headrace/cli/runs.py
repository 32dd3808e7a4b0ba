"""`train`, `resume` and `export`: from words to a `RunOptions`, and a run shown on this terminal.

Invariant: options win over key=value words, and these win over the YAML file.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace.cli.plain_errors import INTERRUPTED, leave, leave_failed_step, leave_lost_rank, places_plainly
from headrace.cli.screen import show
from headrace.cli.streams import StdoutLost
from headrace.files.yaml_options import read_yaml
from headrace.report import LineProgress, LiveProgress, Reporter
from headrace.runs import Interrupted, RunDirectory, RunOptions, resume, train
from headrace.runs.prepare import default_output
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
