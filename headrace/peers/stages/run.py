"""A run whose blocks lie on several machines, in stages (AxoNN): stage 0's run is that of `loop`, and the others follow it.

Invariant: stage 0 alone has model, data and `output`, and decides which step is the last. If a stage is lost, all wait for it,
and go on from the last commit.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import headrace
from headrace.files.scratch import remove_tree
from headrace.peers.meet.address import Address
from headrace.peers.meet.meeting import Meeting, own_stage
from headrace.peers.meet.proof import read_secret
from headrace.peers.meet.same_run import WORKERS_OWN, refuse_another_run, until_done
from headrace.runs.loop import Finished, resume, train
from headrace.runs.protocols import Display, NoDisplay
from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import ConfigError
from headrace.terms.options.options import Options
from headrace.terms.options.run_options import RunOptions
from headrace.update.combinations import refuse_in_stages

if TYPE_CHECKING:
    from headrace.peers.stages.line import Line

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """The stages of a run, and which of them this process is."""

    addresses: tuple[Address, ...]
    stage: int
    secret: bytes | None = None
    wait_seconds: float = 600.0
    silence_seconds: float = 20.0

    @classmethod
    def of(cls, stages: str, stage: int | None, secret: Path | None, wait_seconds: float) -> "Staging":
        """Return what the options of a command say.

        Raises:
            ConfigError: they do not say which stages there are, or which one this is.
        """
        addresses = tuple(Address.of(text.strip(), key="stages") for text in stages.split(","))
        return cls(
            addresses=addresses,
            stage=own_stage(addresses, stage),
            secret=read_secret(secret),
            wait_seconds=wait_seconds,
        )

    def meeting(self) -> Meeting:
        """Return where they meet."""
        return Meeting(
            self.addresses,
            self.stage,
            version=headrace.__version__,
            secret=self.secret,
            silence_seconds=self.silence_seconds,
            wait_seconds=self.wait_seconds,
        )


def train_in_stages(config: RunOptions, staging: Staging, *, display: Display | None = None) -> Finished:
    """Be stage 0 of a new run of `config`, or of the same run where it was begun before.

    Raises:
        RunDirectoryError: `output` holds another run, or one that began with other options.
        As `train` and `resume`, except for lost stages: they are waited for.
    """
    from headrace.runs.job import directory_of

    directory = directory_of(config)
    config = replace(config, output=directory.path, measure=False)
    refuse_in_stages(config)
    if directory.config.exists():
        refuse_another_run(directory, config)
    return _lead(directory, config, staging, display or NoDisplay())


def resume_in_stages(run_directory: Path, staging: Staging, *, display: Display | None = None) -> Finished:
    """Be stage 0 of a run that goes on. Raises as `train_in_stages`."""
    return _lead(RunDirectory(run_directory.absolute()), None, staging, display or NoDisplay())


def _lead(directory: RunDirectory, config: RunOptions | None, staging: Staging, display: Display) -> Finished:
    if staging.stage:
        raise ConfigError(f"stage: this is stage {staging.stage}, and stage 0 has the run; leave its files out")

    def lead(meeting: Meeting) -> Finished:
        with _met(meeting, display) as line:
            from headrace.engine.seams import Seams
            from headrace.peers.stages.staged import StagedEngine
            from headrace.runs.engines import engines_of

            engines = engines_of(StagedEngine, Seams(fleet=line))
            if config is None or directory.config.exists():
                return _with_shares(resume(directory.path, display=display, engines=engines), line)
            return _with_shares(train(config, display=display, engines=engines), line)

    return _until_done(staging, lead, display)


def _with_shares(finished: Finished, line: "Line") -> Finished:
    """Add to the run's summary how busy stages were since the last start."""
    RunDirectory(finished.run_directory).add_to_summary({"stages": line.stage_shares.to_json(line.num_groups)})
    return finished


def follow_as_stage(options: Options, staging: Staging, *, display: Display | None = None) -> None:
    """Be another stage, with its part of the run in the first SSD directory of `options`, until the run ends. Of these options
    the `WORKERS_OWN` count.

    Raises:
        StepFailed: a step failed here; the last committed step is untouched.
        InputError, DiskFull: the run cannot be done here.
    """
    display = display or NoDisplay()
    _until_done(staging, lambda meeting: _follow_once(options, staging, meeting, display), display)


def _until_done(staging: Staging, work: Callable[[Meeting], _Found], display: Display) -> _Found:
    """Return what `work` returns; where a stage is lost meanwhile, meet again."""
    with staging.meeting() as meeting:
        words = "going on from the last committed step once it is back"
        return until_done(lambda: work(meeting), lambda lost: display.say(f"{lost}; {words}"))


def _follow_once(options: Options, staging: Staging, meeting: Meeting, display: Display) -> None:
    """Follow stage 0 until the run ends."""
    from headrace.peers.ranks.sharded import join_as_rank
    from headrace.peers.stages.staged import StagedEngine

    folders = list[Path]()

    def place(told: Mapping[str, Any]) -> Path:
        folders.append(options.budget.ssd[0] / f"headrace-stage-{staging.stage}-{told['run_id']}")
        return folders[0]

    own = {key: getattr(options, key) for key in WORKERS_OWN}
    with _met(meeting, display) as line, join_as_rank(line, place, lambda event: None, StagedEngine, own) as engine:
        blocks, plan = line.blocks(engine.chain.num_blocks), engine.plan
        assert plan is not None, "stages begin with a plan"
        display.say(f"stage {staging.stage}: blocks {blocks[0] - 1} to {blocks[-1] - 1} of {engine.chain.num_blocks}")
        for line_of_plan in plan.results.explain_peaks():
            display.say(line_of_plan)
        is_over = engine.follow()
    if is_over:
        remove_tree(folders[0])
    display.say("done" if is_over else "stage 0 has ended; start both again to go on")


@contextmanager
def _met(meeting: Meeting, display: Display) -> Iterator["Line"]:
    from headrace.peers.stages.line import LANES, Line

    line = Line(meeting.meet(LANES, display.say))
    try:
        yield line
    finally:
        line.ranks.close()
