"""`train`, `resume` and `export`: from words to a `RunOptions`, and a run shown on this terminal.

Invariant: options win over key=value words, and these win over the YAML file.
"""

import contextlib
import errno
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace.cli.plain_errors import INTERRUPTED, leave, leave_failed_step, places_plainly
from headrace.cli.screen import show
from headrace.cli.streams import StdoutLost
from headrace.files.durable import appearing
from headrace.files.yaml_options import read_yaml
from headrace.report import LineProgress, LiveProgress, Reporter
from headrace.runs import Interrupted, RunDirectory, RunOptions, resume, train
from headrace.runs.prepare import default_output
from headrace.runs.protocols import RunningEngine, StateKind
from headrace.terms.adapter import adapter_of
from headrace.terms.errors import ConfigError, ExportFailed, RunDirectoryError, StepFailed
from headrace.terms.launch import Launch
from headrace.terms.options import Options
from headrace.terms.provenance import PROVENANCE_NAME
from headrace.terms.run_options import NodeOptions
from headrace.terms.sizes import format_bytes


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
    with _stops(RunDirectory(Path(config.output or default_output(config)))), places_plainly(lambda: vars(config).values()):
        if launch is None:
            train(config, display=Terminal())
        else:
            from headrace.runs.ranks import train_in_ranks

            train_in_ranks(config, launch, display=Terminal())


def serve_run(config: NodeOptions) -> None:
    """Be the node of a run; a stop signal ends the process with 130 or 143."""
    from headrace.runs.node import serve

    terminal = Terminal()
    with _stops(RunDirectory(Path(config.output or default_output(config)))), places_plainly(lambda: vars(config).values()):
        serve(config, display=terminal, listening=lambda address: terminal.say(f"listening at {address}"))


def work_for(node: str, words: Sequence[str], options: Mapping[str, Any], *, wait_seconds: float, secret: Path | None) -> None:
    """Compute for the run of the node at `node`. Only the options that belong to this process may be given. A RUN.YAML may be
    given, too: its budgets are used here, and options that affect results must match the node's.

    Raises:
        ConfigError: other options are given, or one differs.
    """
    from headrace.net import Address
    from headrace.runs.node import WORKERS_OWN, asked_of, read_secret, work

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
        asked=asked_of(asked, words[0]) if is_file else {},
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
    with _stops(run), places_plainly(lambda: vars(run.read_config()).values()):
        if launch is None:
            resume(run_directory, display=Terminal())
        else:
            from headrace.runs.ranks import resume_in_ranks

            resume_in_ranks(run_directory.absolute(), launch, display=Terminal())


@contextlib.contextmanager
def _stops(run: RunDirectory) -> Iterator[None]:
    """End the process as shells expect it, with a word about how to go on if anything can go on."""
    try:
        yield
    except Interrupted as stop:
        leave(str(stop), stop.exit_code)
    except StdoutLost as error:  # if nothing was begun, or all is done, nothing can go on
        raise run.unwritable(error) if run.config.exists() and not run.final.exists() else error from error
    except StepFailed as error:
        leave_failed_step(error, run.path)
    except KeyboardInterrupt:  # before the first step, or while the model is written
        how = f"resume with: headrace resume {run.path}" if run.config.exists() else "nothing was begun"
        leave(f"interrupted; {how}", INTERRUPTED)


def export_run(run_directory: Path, out: Path, *, merge: bool = False) -> None:
    """Write the newest committed weights of a run to `out`; if it is finished, its final model. A run of adapters writes these,
    or with `merge` the model that results from merging them with the model beside which they were trained.

    Raises:
        ConfigError: there is nothing to merge.
        RunDirectoryError: `out` exists, or the run has no weights yet.
        ExportFailed: there is no space, or `out` cannot be written; nothing is left there.
    """
    if out.exists():
        raise RunDirectoryError(f"{out} exists; name a new directory; nothing was written")
    run = RunDirectory(run_directory.absolute())
    config = run.read_config()  # reports if this is no run at all
    if merge and config.adapter is None:
        raise ConfigError(f"merge: {run.path} trains no adapters; leave --merge out, its export is the whole model")
    if merge and not adapter_of(str(config.adapter)).merges:
        raise ConfigError(f"merge: {config.adapter} of {run.path} is no matrix, and cannot be merged; leave --merge out")
    if os.path.realpath(out) == os.path.realpath(run.final):
        raise RunDirectoryError(f"{out} is where the finished model of this run goes; name another directory")

    from headrace.runs.engines import headrace_engines  # late, because it imports the kernels' compiler
    from headrace.store import lock_holder

    engines = headrace_engines()
    kind = engines.state_of(run.path)
    if kind is StateKind.COMMITTED:
        with engines.resume(run.path, to_train=False) as engine, _repeatable(run):
            if merge:
                _merge_newest(engine, run, config.model, out.absolute())
            else:
                engine.save_pretrained(out.absolute())
            _ended(config, out)
    elif run.final.is_dir():
        with _repeatable(run):
            if merge:
                _merge(config.model, run.final, out.absolute())
            else:
                _copy_final(run.final, out.absolute())
            _ended(config, out)
    elif (holder := lock_holder(run.path)) is not None:
        raise RunDirectoryError(f"{run.path}: process {holder} imports the model; export it once steps are committed")
    else:
        raise RunDirectoryError(f"{run.path}: the run was stopped before its first commit; `headrace resume` begins it again")


def _ended(config: RunOptions, out: Path) -> None:
    """Let answers of the exported model end where turns of its conversations do."""
    from headrace.data.turn_end import add_turn_end  # late: it brings the tokenizer

    try:
        note = add_turn_end(config, out.absolute())
    except OSError as error:
        raise ExportFailed(f"export to {out}: {_cause(error)}; remove it") from error
    if note:
        show(f"note: {note}")


def _merge_newest(engine: RunningEngine, run: RunDirectory, model: Path, out: Path) -> None:
    """Write a model merged with the newest adapters of a run that is not finished."""
    with tempfile.TemporaryDirectory(dir=run.path, prefix="merging-") as folder:
        engine.save_pretrained(Path(folder) / "adapter")
        _merge(model, Path(folder) / "adapter", out)


def _merge(model: Path, adapter: Path, out: Path) -> None:
    """Write a model merged with an adapter; it says of which run it is."""
    from headrace.engine.merging import merge_adapters

    merge_adapters(model, adapter, out, {PROVENANCE_NAME: (adapter / PROVENANCE_NAME).read_text(encoding="utf-8")})


@contextlib.contextmanager
def _repeatable(run: RunDirectory) -> Iterator[None]:
    """Add to the message of a failed export that the run is intact."""
    try:
        yield
    except ExportFailed as error:
        raise ExportFailed(f"{error}. The run is intact: repeat `headrace export {run.path} OUT` then") from error


def _copy_final(final: Path, out: Path) -> None:
    """Copy a finished model to `out`, which appears complete or not at all."""
    try:
        with appearing(out) as partial:
            shutil.copytree(final, partial, dirs_exist_ok=True)
    except OSError as error:
        if os.strerror(errno.ENOSPC) not in str(error):
            raise ExportFailed(f"export to {out}: {_cause(error)}; name another directory") from error
        needed = sum(path.stat().st_size for path in final.rglob("*") if path.is_file())
        free = shutil.disk_usage(Path(os.path.realpath(out)).parent).free
        raise ExportFailed(
            f"export to {out}: needs {format_bytes(needed)}, free are {format_bytes(free)}; free some space or choose another "
            "directory"
        ) from error


def _cause(error: OSError) -> str:
    """Return what the system said; `copytree` raises a list of (source, target, error), of which the first is used."""
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list) and error.args[0]:
        return str(error.args[0][0][-1])
    return error.strerror or str(error)
