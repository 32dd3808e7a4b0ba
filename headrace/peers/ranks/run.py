"""A run of several ranks, which torchrun starts: all share out every unit, and rank 0's run is that of `loop`.

Invariant: rank 0 alone has model, data and `output`, and speaks. If a rank is lost all end, and the next start goes on.
"""

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headrace
from headrace.files.scratch import remove_tree
from headrace.peers.meet.of_rank import host_bytes_of_rank, take_gpu
from headrace.peers.meet.ranks import Ranks
from headrace.runs.loop import Finished, resume, train
from headrace.runs.protocols import Display, Engines
from headrace.store.run_directory import RunDirectory
from headrace.terms.launch import Launch
from headrace.terms.options.run_options import RunOptions

if TYPE_CHECKING:
    from headrace.peers.ranks.fleet import Fleet


def train_in_ranks(config: RunOptions, launch: Launch, *, display: Display | None = None) -> Finished:
    """Be rank 0 of a new run of `config`, or of the same run where torchrun starts it again.

    Raises:
        As `train` and `resume`; PeerLost: a rank did not come, or is gone.
    """
    from headrace.runs.prepare import default_output

    directory = RunDirectory(Path(config.output or default_output(config)).absolute())
    if launch.again and directory.config.exists():
        return resume_in_ranks(directory.path, launch, display=display)
    host = config.host_memory or host_bytes_of_rank(launch)
    with _fleet(launch) as fleet:
        # What other ranks do meanwhile would be measured along.
        found = train(replace(config, measure=False, host_memory=host), display=display, engines=_engines(fleet))
        return _with_ranks(found, fleet)


def resume_in_ranks(run_directory: Path, launch: Launch, *, display: Display | None = None) -> Finished:
    """Be rank 0 of a run that goes on. Raises as `train_in_ranks`."""
    with _fleet(launch) as fleet:
        return _with_ranks(resume(run_directory, display=display, engines=_engines(fleet)), fleet)


def follow(launch: Launch) -> None:
    """Be another rank: do what rank 0 says until the run ends. Signals are heeded by rank 0.

    Raises:
        PeerLost, StepFailed: a rank is gone; the last committed step is untouched.
        InputError, DiskFull: the run cannot be shared out here.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    take_gpu(launch)
    with _fleet(launch) as fleet:
        from headrace.peers.ranks.sharded import join_as_rank

        folders = list[Path]()

        def place(told: Mapping[str, Any]) -> Path:
            folders.append(fleet.folder_of(told, launch.rank))
            return folders[0]

        with join_as_rank(fleet, place, lambda event: None) as engine:
            is_over = engine.follow()
        if is_over:
            remove_tree(folders[0])


def _with_ranks(finished: Finished, fleet: "Fleet") -> Finished:
    """Add to the run's summary what each rank did since the last start."""
    ranks = [fleet.figures[rank] for rank in sorted(fleet.figures)]
    RunDirectory(finished.run_directory).add_to_summary({"ranks": ranks})
    return finished


@contextmanager
def _fleet(launch: Launch) -> Iterator["Fleet"]:
    from headrace.peers.ranks.fleet import Fleet

    with Ranks.of(launch, headrace.__version__) as ranks:
        yield Fleet(ranks)


def _engines(fleet: "Fleet") -> Engines:
    from headrace.engine.seams import Seams
    from headrace.peers.ranks.sharded import ShardedEngine
    from headrace.runs.engines import engines_of

    return engines_of(ShardedEngine, Seams(fleet=fleet))
