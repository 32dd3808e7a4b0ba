"""`headrace train` and `headrace resume`: which part of which run this process is."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.cli.first_look import look_at_choices, look_at_words, with_model_here
from headrace.cli.plain_errors import REFUSED, leave
from headrace.process import heavy_imports
from headrace.terms.errors import PeerLost, StepFailed
from headrace.terms.launch import Launch
from headrace.terms.options.run_options import RunOptions


def begin_or_join(
    words: Sequence[str],
    given: Mapping[str, Any],
    launch: Launch | None,
    *,
    node: str | None,
    wait_seconds: float,
    secret: Path | None,
    stages: tuple[str | None, int | None],
) -> None:
    """Begin a run, or take part in one: as a rank of `launch`, as a worker of `node`, or as one of the `stages` named."""
    if launch is not None and launch.rank:
        _follow(launch)
        return
    look_at_words(() if node is not None else words)
    if stages[0] is not None:
        from headrace.cli.runs import train_as_stage

        train_as_stage(words, given, stages[0], stages[1], secret=secret, wait=wait_seconds)
    elif node is not None:
        from headrace.cli.runs import work_for

        work_for(node, words, given, wait_seconds=wait_seconds, secret=secret)
    elif words:
        from headrace.cli.configuration import config_of

        config = config_of(words, given, RunOptions)
        look_at_choices(config)
        config = with_model_here(config)
        with heavy_imports():
            from headrace.cli.runs import start

        start(config, launch)
    else:
        leave("Missing argument 'RUN.YAML | MODEL DATA...', or --node HOST:PORT; see `headrace train --help`", REFUSED)


def go_on(run_directory: Path, launch: Launch | None, *, secret: Path | None, stages: tuple[str | None, int | None]) -> None:
    """Go on with a run, as rank 0 or another one of `launch`, or as stage 0."""
    if stages[0] is not None:
        from headrace.cli.runs import resume_as_stage

        resume_as_stage(run_directory, stages[0], stages[1], secret)
    elif launch is not None and launch.rank:
        _follow(launch)
    else:
        with heavy_imports():
            from headrace.cli.runs import go_on

        go_on(run_directory, launch)


def _follow(launch: Launch) -> None:
    """Be a rank other than 0, which speaks only where it must refuse something itself."""
    from headrace.peers import follow

    try:
        follow(launch)
    except (PeerLost, StepFailed):  # rank 0 says it
        raise SystemExit(REFUSED) from None
