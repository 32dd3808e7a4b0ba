"""A run of several machines: a node that owns it, and workers that compute for it.

The node's run is that of `loop`, with other engines. If a worker is lost, the run continues from its last commit, as `resume`
does but in this process, once another worker is there. Invariant: a worker holds nothing that the node does not have.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, repeat
from typing import TYPE_CHECKING

import headrace
from headrace.peers.meet.address import Address
from headrace.peers.meet.listener import APART, TOGETHER, Listener
from headrace.peers.meet.proof import read_secret
from headrace.peers.meet.same_run import refuse_another_run, until_done
from headrace.runs.loop import Finished, resume, train
from headrace.runs.protocols import Display, NoDisplay
from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import ConfigError, RunDirectoryError
from headrace.terms.options.run_options import NodeOptions

if TYPE_CHECKING:
    from headrace.peers.node.crowd import Crowd


def serve(
    config: NodeOptions,
    *,
    display: Display | None = None,
    silence_seconds: float = 30.0,
    listening: Callable[[Address], None] = lambda address: None,
) -> Finished:
    """Run `config` on a node, or continue its run in `output`, until the model is whole; then dismiss the workers.

    `listening` is told the address for workers, before anything else is done. A peer that is silent for `silence_seconds` is
    lost.

    Raises:
        As `train` and `resume`, except for lost workers: others are waited for.
    """
    display = display or NoDisplay()
    config = replace(config, measure=False)  # most of the time is spent by workers and links
    secret = read_secret(config.secret)
    listener = _listener(config, secret, silence_seconds)
    try:
        listening(listener.address)
        if config.local_steps is not None:
            from headrace.peers.local_steps.node import serve_learners

            return serve_learners(config, listener, display, refuse_another)
        from headrace.peers.node.crowd import Crowd  # late, because it imports the model library: workers may come meanwhile

        crowd = Crowd(listener, config.muster)
        finished = _run(config, crowd, display)
        crowd.dismiss()
        return finished
    finally:
        listener.close()


def _run(config: NodeOptions, crowd: "Crowd", display: Display) -> Finished:
    from headrace.engine.seams import Seams
    from headrace.peers.node.node import NodeEngine
    from headrace.runs.engines import engines_of
    from headrace.runs.job import directory_of

    directory, verify = directory_of(config), chain([True], repeat(False))  # of a start: all that is stored
    if directory.config.exists():
        refuse_another(directory, config)

    def work() -> Finished:
        engines = engines_of(NodeEngine, Seams(workers=crowd), verify=next(verify))
        engines = replace(engines, heed=crowd.heed)
        if directory.config.exists():
            return resume(directory.path, display=display, engines=engines)
        return train(config, display=display, engines=engines)

    def on_loss(words: str) -> None:
        display.say(f"{words}; going on from the last committed step")
        crowd.part(words)

    return until_done(work, on_loss)


def refuse_another(directory: RunDirectory, config: NodeOptions) -> None:
    """Refuse to take another run for this one, or to resume it under options that would be ignored.

    Raises:
        RunDirectoryError: `output` holds a run without a node; or see `refuse_another_run`.
    """
    if not isinstance(directory.read_config(), NodeOptions):
        raise RunDirectoryError(f"output: {directory.path} holds a run without a node; name another directory with --output")
    refuse_another_run(directory, config)


def _listener(config: NodeOptions, secret: bytes | None, silence_seconds: float) -> Listener:
    """Return what listens; where the address is taken, the node of the same run may be what has it.

    Raises:
        ConfigError: the address cannot be used.
        RunDirectoryError: a process works on the run.
    """
    try:
        return Listener(
            Address.of(config.listen),
            version=headrace.__version__,
            secret=secret,
            silence_seconds=silence_seconds,
            shape=TOGETHER if config.local_steps is None else APART,
        )
    except ConfigError as error:
        from headrace.runs.job import directory_of
        from headrace.store import lock_holder

        folder = directory_of(config).path
        if (holder := lock_holder(folder)) is None:
            raise
        raise RunDirectoryError(
            f"{folder}: in use by process {holder or 'unknown'}; wait for it or stop it; a run has one process"
        ) from error
