"""A node's talk with one learner: it is told the run, given rows and weights, and what it has learned is taken."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from headrace.peers.local_steps.broker import Broker, LearnerWork
from headrace.peers.local_steps.talk import (
    LEARNER,
    file_digests_of,
    receive_units,
    send_batches,
    send_files,
    send_units,
    sizes_of,
)
from headrace.peers.meet.generation import Generation
from headrace.terms.errors import PeerLost, Unlike
from headrace.update.sites.travel import Travel


@dataclass(frozen=True, kw_only=True)
class Told:
    """What each learner is told first: the run, its options, and the files of its model."""

    run_id: str
    options: Mapping[str, Any]
    files: Mapping[str, Path]
    counts: tuple[int, ...]
    digest: str
    travel: Travel

    @cached_property
    def sums(self) -> dict[str, str]:
        """Digests of the model's files, for learners that have the model already."""
        return file_digests_of(self.files)


_ANSWER = {"peer": str, "wants_sums": bool, "wants_files": bool}


class Session:
    """The talk over the lanes of `generation`, on behalf of `broker`."""

    def __init__(self, broker: Broker, generation: Generation, told: Told) -> None:
        self._broker, self._told, self._generation = broker, told, generation
        self._up, self._down = generation.up, generation.down

    def run(self) -> None:
        """Serve the learner until the run is over.

        Raises:
            PeerLost: it is gone.
        """
        told = self._told
        words: dict[str, Any] = {"run_id": told.run_id, "options": dict(told.options), "files": sizes_of(told.files)}
        words |= {"total_steps": self._broker.total_steps, "travel": told.travel.name}
        self._down.send_message(words, LEARNER)
        answer = self._up.receive_message(LEARNER, _ANSWER)
        if answer["wants_sums"]:
            self._down.send_message(told.sums, LEARNER)
            answer = self._up.receive_message(LEARNER, _ANSWER)
        if answer["wants_files"]:
            send_files(self._down, told.files)
        with self._broker.learner(str(answer["peer"])) as number:
            ready = self._up.receive_message(LEARNER, {"digest": str})
            alike = ready["digest"] == told.digest
            self._down.send_message({"learner": number, "alike": alike}, LEARNER)
            while alike and self._serve(number):
                pass

    def _serve(self, number: int) -> bool:
        """Do what the learner asks for; return whether it may ask again."""
        words = self._up.receive_message(LEARNER, {"do": str})
        if words["do"] == "push":
            self._take(number, words)
            return True
        held, lot = (None if words.get(key) is None else int(words[key]) for key in ("held", "lot"))
        with self._broker.work(number, held, lot, lambda: self._generation.has_ended) as work:
            if self._generation.has_ended:
                raise PeerLost("its generation has ended")
            reason = None if work is not None or self._broker.is_over else self._broker.why_no_more(number)
            self._down.send_message({"over": work is None, "refused": reason}, LEARNER)
            if work is not None:
                self._give(work)
        return work is not None

    def _give(self, work: LearnerWork) -> None:
        lot = work.lot
        versions = range(lot.base - len(work.files) + 1, lot.base + 1)
        words = {"lot": lot.number, "base": lot.base, "whole": work.whole, "first_step": work.first_step}
        self._down.send_message({**words, "versions": list(versions)}, LEARNER)
        for file in work.files:
            send_units(self._down, LEARNER, (file.read(unit) for unit in range(len(file.counts))))
        send_batches(self._down, work.batches)

    def _take(self, learner: int, words: Mapping[str, Any]) -> None:
        lot = int(words["lot"])
        reason = self._broker.why_not(learner, lot)
        self._down.send_message({"refused": reason}, LEARNER)
        if reason is None:
            travel = self._told.travel
            units = receive_units(self._up, LEARNER, travel.sizes(self._told.counts), travel.dtype)
            try:
                reason = self._broker.take(lot, units, {"loss": float(np.float64(words["loss"]))})
            except Unlike as unlike:
                reason = str(unlike)
                self._broker.throw_out(lot, reason)
            self._down.send_message({"refused": reason}, LEARNER)
