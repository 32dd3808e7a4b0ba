"""Processes that torchrun starts share out a file of prompts: the answers are, byte for byte, those of one process."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from node_processes import rank_process
from test_jobs import LINES, WRONG, answer, options_for, write

from headrace.generate.uses.job_tasks import Answers, JobShape, JobTask
from headrace.peers.meet.ranks import Ranks
from headrace.peers.ranks import jobs as job_ranks
from headrace.peers.ranks.jobs import RankHelpers, answer_for
from headrace.terms.errors import PeerLost, PlanInfeasible, StorageError
from headrace.terms.options.generate_options import GenerateOptions

LIMIT_SECONDS = 200.0
TASKS = [JobTask(number, ((number, 2),), number, {"seed": number}) for number in range(7)]
SHAPE = JobShape(2, 4, 1, {"rows": 1})


@contextmanager
def met(size: int) -> Iterator[list[Ranks]]:
    """Ranks of one process, which meet at a store on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found: dict[int, Ranks] = {}

    def meet(rank: int) -> None:
        found[rank] = Ranks.meet("127.0.0.1", port, rank, size, hosts=True)

    threads = [Thread(target=meet, args=(rank,)) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    ranks = [found[rank] for rank in range(size)]
    try:
        yield ranks
    finally:
        for each in ranks:
            each.close()


class Double:
    """Stands for a generator: it can be planned for and used, if there is room."""

    model = SimpleNamespace(directory=Path(), tokenizer=lambda: None)

    def __init__(self, *, has_room: bool = True) -> None:
        self.has_room = has_room

    def plan_only(self, prompts: int, *shape: Any, **fixed: Any) -> Any:
        if not self.has_room:
            raise PlanInfeasible("no room", tier="host", needed_bytes=2, allowed_bytes=1)
        assert prompts >= fixed["rows"]
        return None

    def use(self, plan: Any) -> None:
        """Take it."""


@pytest.fixture(autouse=True)
def doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers follow from the task alone."""

    def answered(generator: Any, options: Any, tokenizer: Any, tasks: Sequence[JobTask]) -> Iterator[tuple[int, Answers]]:
        for each in tasks:
            yield each.number, [{"completion": f"{each.number} {each.rows} {each.seed} {each.settings}"}]

    monkeypatch.setattr(job_ranks, "answered", answered)


class Shared:
    """Ranks beside rank 0, in threads; `failures` are what they raised."""

    def __init__(self, ranks: list[Ranks], *, lost: int = -1, poor: int = -1) -> None:
        self.failures, self._lost, self._poor = dict[int, BaseException](), lost, poor
        self._threads = [Thread(target=self._help, args=(each,)) for each in ranks[1:]]
        for each in self._threads:
            each.start()

    def join(self) -> None:
        for each in self._threads:
            each.join(LIMIT_SECONDS)
            assert not each.is_alive()

    def _help(self, rank: Ranks) -> None:
        if rank.rank == self._lost:
            rank.close()
            return
        generator: Any = Double(has_room=rank.rank != self._poor)
        try:
            answer_for(generator, GenerateOptions(), rank)
        except BaseException as failure:
            self.failures[rank.rank] = failure
            rank.close()


@pytest.mark.parametrize("tasks", [TASKS, TASKS[:1], []])
def test_each_task_is_answered_once(tasks: list[JobTask]) -> None:
    found: dict[int, Answers] = {}
    with met(3) as ranks:
        shared, helpers = Shared(ranks), RankHelpers(ranks[0])

        def keep(number: int, answers: Answers) -> None:
            assert number not in found
            found[number] = answers

        for number, answers in job_ranks.answered(None, None, None, helpers.deal(tasks, SHAPE, keep)):  # type: ignore[arg-type]
            keep(number, answers)
        helpers.finish()
        shared.join()
    assert shared.failures == {}
    assert found == {each.number: [{"completion": f"{each.number} {each.rows} {each.seed} {each.settings}"}] for each in tasks}


@pytest.mark.parametrize("trouble", ["lost", "poor"])
def test_a_rank_that_is_lost_or_has_no_room_ends_all(trouble: str) -> None:
    with met(3) as ranks:
        shared, helpers = Shared(ranks, **{trouble: 2}), RankHelpers(ranks[0])
        with pytest.raises(PeerLost):
            finish(helpers)
        ranks[0].close()
        shared.join()
    if trouble == "poor":
        assert isinstance(shared.failures[2], PlanInfeasible)


def finish(helpers: RankHelpers) -> None:
    helpers.deal(TASKS, SHAPE, lambda number, answers: None)
    helpers.finish()


def test_answers_that_cannot_be_written_end_all() -> None:
    def keep(number: int, answers: Answers) -> None:
        raise StorageError("full")

    with met(2) as ranks:
        shared, helpers = Shared(ranks), RankHelpers(ranks[0])
        helpers.deal(TASKS, SHAPE, keep)
        with pytest.raises(StorageError, match="full"):
            helpers.finish()
        ranks[0].close()
        shared.join()


class Torchrun:
    """A torchrun command whose ranks answer the file of `folder`."""

    def __init__(self, model: Path, folder: Path, *words: str) -> None:
        self.log = folder / "log"
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
        given = options_for(folder).to_json()
        options = ["max_new_tokens", "rows", "seats", "temperature", "host_memory"]
        flags = [f"--{name.replace('_', '-')}={given[name]}" for name in options]
        files = [f"--input={folder}/in.jsonl", f"--output={folder}/out.jsonl"] if not words else list(words)
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, *torchrun, "-m", "headrace", "generate", str(model), *flags, *files],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def end(self) -> int:
        return self.process.wait(LIMIT_SECONDS)


@pytest.mark.process
@pytest.mark.parametrize("killed", [0, 1])
def test_torchrun_answers_as_one_process_does_also_after_a_kill(model: Path, tmp_path: Path, killed: int) -> None:
    lines = [line for number, line in enumerate(LINES) if number not in WRONG] * 6
    for name in ("alone", "shared"):
        write(tmp_path / name, lines)
    assert answer(model, options_for(tmp_path / "alone")) == 0
    folder = tmp_path / "shared"
    first, done = Torchrun(model, folder), folder / "out.jsonl.job" / "done.jsonl"
    limit = time.monotonic() + LIMIT_SECONDS
    while first.process.poll() is None and not (done.exists() and done.stat().st_size) and time.monotonic() < limit:
        time.sleep(0.02)
    os.kill(rank_process(first.process.pid, killed), signal.SIGKILL)  # torchrun starts all again, and the job goes on
    assert first.end() == 0, (folder / "log").read_text()
    assert (folder / "out.jsonl").read_bytes() == (tmp_path / "alone" / "out.jsonl").read_bytes()
    assert "answers, " in (folder / "log").read_text()


@pytest.mark.process
def test_torchrun_with_a_prompt_is_refused(model: Path, tmp_path: Path) -> None:
    run = Torchrun(model, tmp_path, "--prompt=w")
    assert run.end() != 0
    said = run.log.read_text()
    assert "give --input and --output" in said
