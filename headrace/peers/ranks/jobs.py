"""A job of prompts that several processes share out, which torchrun started: rank 0 keeps the job, and all answer.

Rank 0 alone reads the input and writes. Each rank has the whole model, and takes every W-th micro-batch of those that are left.
Invariant: what a micro-batch answers follows from the job, whichever rank takes it.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from headrace.generate.passes.generator import Generator
from headrace.generate.uses.job_tasks import Answers, JobShape, JobTask, answered
from headrace.peers.meet.ranks import Ranks
from headrace.terms.errors import HeadraceError
from headrace.terms.options.generate_options import GenerateOptions

_LEADER = 0


class RankHelpers:
    """The other ranks of a job, as rank 0 sees them: `Helpers`."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def deal(self, tasks: Sequence[JobTask], shape: JobShape, keep: Callable[[int, Answers], None]) -> Sequence[JobTask]:
        """Give each rank every W-th task; see `Helpers`."""
        for rank in self._ranks.others:
            own = [each.to_json() for each in tasks[rank :: self._ranks.size]]
            words = {"tasks": own, "shape": shape.to_json()}
            self._ranks.control.send_message(words, rank)
        for rank in self._ranks.others:
            thread = threading.Thread(target=self._gather, args=(rank, keep), name=f"headrace rank {rank}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return tasks[:: self._ranks.size]

    def look(self) -> None:
        """Raise PeerLost or StorageError; see `Helpers`."""
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Wait for the answers of all; see `Helpers`."""
        for thread in self._threads:
            thread.join()
        self.look()
        for rank in self._ranks.others:
            self._ranks.control.send_message({"over": True}, rank)

    def _gather(self, rank: int, keep: Callable[[int, Answers], None]) -> None:
        try:
            while "over" not in (words := self._ranks.control.receive_message(rank)):
                keep(words["number"], words["answers"])
        except BaseException as failure:
            self._failure = self._failure or failure
            self._ranks.end(str(failure))


def answer_for(generator: Generator, options: GenerateOptions, ranks: Ranks) -> None:
    """Be another rank of a job: answer what rank 0 gives, and return when all is kept.

    Raises:
        PeerLost: rank 0 is gone. PlanInfeasible, InputError: this rank cannot take its share; the others are told.
    """
    control = ranks.control
    words: dict[str, Any] = control.receive_message(_LEADER)
    tasks = [JobTask.from_json(each) for each in words["tasks"]]
    try:
        if tasks:
            shape, rows = JobShape.from_json(words["shape"]), sum(len(each.rows) for each in tasks)
            generator.use(shape.plan(generator, max(rows, int(shape.fixed.get("rows", 1)))))
            tokenizer = generator.model.tokenizer()
            for number, found in answered(generator, options, tokenizer, tasks):
                control.send_message({"number": number, "answers": found}, _LEADER)
    except HeadraceError as error:
        ranks.end(f"rank {ranks.rank}: {error}")
        raise
    control.send_message({"over": True}, _LEADER)
    control.receive_message(_LEADER)
