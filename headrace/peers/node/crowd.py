"""The workers of a node, as its engine sees them: gathered, agreed with, told about steps, and dismissed at the end.

Invariant: what decides the bits of the run is equal for all workers and in all generations (`terms.grouping`), and all workers
take the same turns.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from numpy.typing import NDArray

from headrace.flow.step.serve import Report, StepTask, task_message
from headrace.machine.host_memory import Bytes
from headrace.peers.meet.exchange import NODE, spread_out, take_sum
from headrace.peers.meet.generation import Generation
from headrace.peers.meet.lane import has_keys
from headrace.peers.meet.lane_diary import ops_of
from headrace.peers.meet.listener import Listener
from headrace.peers.meet.talk import hear, tell
from headrace.peers.node.programs import Turn
from headrace.terms.errors import ConfigError, DataError, PeerLost
from headrace.terms.events import OpDone
from headrace.terms.grouping import Grouping
from headrace.terms.lanes import Peer
from headrace.terms.layout import UnitLayout
from headrace.terms.options.muster import Muster
from headrace.terms.options.summing import SEQUENTIAL, TREE, Dealing, Order, order_of, shares_of
from headrace.update.rules.tensors import as_tensor

_NUMBER = int | float | None
_REPORT = {"loss_sum": _NUMBER, "aside_loss": _NUMBER, "lanes": dict}
# A dealing of micro-batches gives way to one that takes less than this share of its time.
_WORTH = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a worker must know to compute: the model's configuration and buffers, the run's options, and the size of a step.

    `grouping` is None if the run has taken no step yet: the first worker's plan then decides it.
    """

    config: Mapping[str, Any]
    options: Mapping[str, Any]
    sequences: int
    length: int
    grouping: Grouping | None
    layouts: str
    total_steps: int
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    most: int = 1  # workers that may take part: the first one's plan leaves a micro-batch for each
    spares: bool = False  # a worker without room for the grouping stays a spare

    def send(self, generation: Generation, rank: int) -> None:
        """Send it to a worker."""
        words = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "buffers"}
        words["grouping"] = self.grouping.to_json() if self.grouping else None
        tell(generation.down, words, rank, self.buffers)

    @classmethod
    def receive(cls, generation: Generation) -> "Setup":
        """Return what the node sent."""
        words, buffers = hear(generation.down, NODE)
        grouping = Grouping.from_json(words["grouping"]) if words["grouping"] else None
        return cls(**{**words, "grouping": grouping, "buffers": buffers})


def layouts_digest(layouts: Sequence[UnitLayout]) -> str:
    """Return a digest of a model's layouts."""
    return hashlib.blake2b(repr(tuple(layouts)).encode(), digest_size=16).hexdigest()


class Crowd:
    """The workers of `listener`, as many as `muster` says. Under `SEQUENTIAL` sums their number is fixed."""

    def __init__(self, listener: Listener, muster: Muster) -> None:
        self.listener, self.muster = listener, muster
        self._expected = 0  # workers that were there before
        self._check: Callable[[], None] = lambda: None
        self._generation: Generation | None = None
        self._terms: Terms | None = None
        self._way = SEQUENTIAL
        self._seconds: dict[int, float] = {}  # that workers of this generation took for a micro-batch, by rank
        self._order: tuple[int, Order] | None = None  # of so many micro-batches
        self._told_seconds: dict[int, float] = {}  # when each was told of the step that is under way
        self._step, self._shares = 0, dict[int, range]()

    def gather(self, setup: Setup, tell: Callable[[str], None]) -> "Terms":
        """Wait for workers, and return what was agreed upon with them; at once where they are there."""
        self._way = str(setup.options["gradient_sum"])
        hint = ""
        if self._way == TREE and not self.muster.is_elastic and self.muster.least > 1:
            hint = f"; with --workers 1:{self.muster.least} the run would go on with fewer"
        while self._generation is None:
            generation = self.listener.gather(self.muster, tell, self._check, expected=self._expected, hint=hint)
            self._expected = max(self._expected, generation.num_workers)
            try:
                self._terms, self._generation = _agreed(setup, generation), generation
                self._seconds.clear()
                self._order = None
                self.limit_to(*_limit(setup, self._terms.grouping))  # who comes later is told at once
            except _CannotFollow as spares:
                for rank, reason in spares.reasons.items():
                    self.listener.keep_as_spare(rank, reason)
                    tell(f"{generation.names[rank]} stays a spare: {reason}")
                self._expected = generation.num_workers - len(spares.reasons)
                self.part("who can follow begins again")
            except _TooMany as found:
                self.limit_to(found.most, str(found))
                tell(f"not all workers can take part: {found}")
                self.part(str(found))
            except PeerLost as lost:
                words = str(lost)
                self.part(words)
                tell(f"{words}; waiting for another worker")
        assert self._terms is not None, "a generation has agreed"
        self._expected = self._generation.num_workers
        return self._terms

    @property
    def may_grow(self) -> bool:
        """Whether somebody waits who could take part from the next step on."""
        generation = self._generation
        return generation is not None and generation.num_workers < self.muster.most and self.listener.num_waiting() > 0

    def grow(self) -> None:
        """End the generation between two steps, so that the next one has those that wait, too."""
        self._expected = self.generation.num_workers + self.listener.num_waiting()
        self.part("another worker joins the run")

    def limit_to(self, most: int, reason: str) -> None:
        """Take no more than `most` workers, for this reason.

        Raises:
            ConfigError: the run was asked to begin with more.
        """
        if most < self.muster.least:
            raise ConfigError(f"workers: {self.muster.least} were asked for, but {reason}")
        if most < self.muster.most:
            self.muster = replace(self.muster, most=most, limit=reason)

    def heed(self, check: Callable[[], None]) -> None:
        """Call `check` while waiting for workers: it may raise an error that ends the waiting, such as a stop signal."""
        self._check = check

    def break_off(self, reason: str) -> None:
        """Wake all who wait on lanes of the generation; what they are told is `reason`."""
        if (generation := self._generation) is not None:
            generation.end(reason)

    def part(self, reason: str) -> None:
        """End the generation; workers will come again."""
        self._generation = None
        self.listener.part(reason)

    def dismiss(self) -> None:
        """Tell workers, and those who wait to be some, that all is done. Who is lost now is no loss: if it lives, it comes
        again, and is told then.
        """
        self.listener.tell_over()
        if self._generation is not None:
            for rank in range(1, self._generation.num_workers + 1):
                with suppress(PeerLost):
                    tell(self._generation.down, {"end": True}, rank)
                    self._generation.up.receive_message(rank)
        self.listener.dismiss()

    @property
    def generation(self) -> Generation:
        """The generation that is working."""
        if self._generation is None:
            raise PeerLost("there are no workers")
        return self._generation

    def announce(self, task: StepTask) -> None:
        """Tell each worker its share of a step."""
        generation, num_micro = self.generation, len(task.batch.micro_batches)
        if num_micro < generation.num_workers:
            raise DataError(
                f"a step of {num_micro} micro-batches is too small for {generation.num_workers} workers; give more "
                "tokens_per_step, or fewer workers"
            )
        order = self._dealt(num_micro)
        self._step, self._shares = task.step, shares_of(num_micro, order, self._way)
        for rank, micros in sorted(self._shares.items()):
            words, rows = task_message(task, micros)
            tell(generation.down, {**words, "order": order}, rank, rows)
            self._told_seconds[rank] = time.perf_counter()

    def _dealt(self, num_micro: int) -> Order:
        """Return how the micro-batches of a step are dealt: a tree by what workers took for one in the steps before."""
        workers = self.generation.num_workers
        if self._order is None or self._order[0] != num_micro:
            self._order = num_micro, order_of(num_micro, workers, self._way)
        if self._way == TREE and len(self._seconds) == workers and self._terms is not None:
            ranks = range(1, workers + 1)
            dealing = Dealing(tuple(self._seconds[rank] for rank in ranks), self._terms.most)
            better = dealing.order(num_micro)
            # What is measured is never twice the same: a dealing is kept until another one is better by this much.
            if dealing.step_seconds(num_micro, better) < _WORTH * dealing.step_seconds(num_micro, self._order[1]):
                self._order = num_micro, better
        return self._order[1]

    @property
    def shares(self) -> dict[int, range]:
        """The micro-batches of the newest step, by rank."""
        return self._shares

    def send(self, unit: int, weights: Bytes) -> None:
        """Send a unit's weights to all workers."""
        spread_out(self.generation.down, weights)

    def receive(self, unit: int, into: NDArray[Any]) -> None:
        """Receive the sum of the workers' gradients of a unit."""
        take_sum(self.generation.up, as_tensor(into, bfloat16=True))

    def report(self) -> Report:
        """Receive the workers' report of a step."""
        generation = self.generation
        found = [generation.up.receive_message(rank, _REPORT) for rank in range(1, generation.num_workers + 1)]
        sums = [each["loss_sum"] for each in found if each.get("loss_sum") is not None]
        asides = [each["aside_loss"] for each in found if each.get("aside_loss") is not None]
        ops: list[OpDone] = []
        for rank, each in enumerate(found, start=1):
            begin = self._told_seconds[rank]
            ops += ops_of(each["lanes"]["ops"], step=self._step, peer=Peer.WORKER, number=rank, begin_seconds=begin)
            if each["lanes"]["compute_seconds"] > 0:
                self._seconds[rank] = each["lanes"]["compute_seconds"] / len(self._shares[rank])
        return Report(loss_sum=sum(sums) if sums else None, aside_loss=asides[0] if asides else None, ops=ops)


class _TooMany(Exception):
    """There are more workers than the `most` that a step has work for."""

    def __init__(self, most: int, words: str) -> None:
        super().__init__(words)
        self.most = most


class _CannotFollow(Exception):
    """Some workers cannot take part: the `reasons`, by rank."""

    def __init__(self, reasons: dict[int, str]) -> None:
        super().__init__()
        self.reasons = reasons


@dataclass(frozen=True, slots=True)
class Terms:
    """What is the same for all workers of a generation: how sums are grouped, and the turns of a step and of a forward pass.
    `most` says how many micro-batches each has room for, by rank.
    """

    grouping: Grouping
    turns: tuple[Turn, ...]
    scoring_turns: tuple[Turn, ...]
    most: tuple[int, ...]


def _agreed(setup: Setup, generation: Generation) -> Terms:
    """Agree with the workers of a generation.

    Raises:
        _TooMany, _CannotFollow: not all of them can take part; the others can without them.
        PeerLost: a worker is gone.
    """
    ranks = range(1, generation.num_workers + 1)
    for rank in ranks:
        setup.send(generation, rank)
    grouping = setup.grouping
    if grouping is None:
        grouping = Grouping.from_json(generation.up.receive_message(1, {"grouping": dict})["grouping"])
    num_micro, words = _limit(setup, grouping)
    if num_micro < len(ranks):
        raise _TooMany(num_micro, words)
    for rank in ranks:
        generation.down.send_message(grouping.to_json(), rank)
    said = [generation.up.receive_message(rank, {}) for rank in ranks]
    for rank, each in enumerate(said, start=1):
        if "cannot" not in each and not has_keys(each, {"turns": list, "most": int}):
            raise PeerLost(f"{generation.names[rank]}: says neither what it can nor what it cannot; is it the same version?")
    unable = {rank: str(each["cannot"]) for rank, each in enumerate(said, start=1) if "cannot" in each}
    first = min((rank for rank in ranks if rank not in unable), default=0)
    for rank in ranks:
        if rank not in unable and said[rank - 1]["turns"] != said[first - 1]["turns"]:
            unable[rank] = (
                f"it would fetch weights in another order than {generation.names[first]}; give both the same --host-memory "
                "and --device-memory"
            )
    if unable:
        raise _CannotFollow(unable)
    turns, scoring = (tuple(Turn(*each) for each in turns) for turns in said[0]["turns"])
    return Terms(grouping, turns, scoring, tuple(int(each["most"]) for each in said))


def _limit(setup: Setup, grouping: Grouping) -> tuple[int, str]:
    """Return how many workers a step has micro-batches for, and why there are no more."""
    num_micro = -(-setup.sequences // grouping.rows)
    many = f"{num_micro} micro-batches" if num_micro > 1 else "one micro-batch"
    return num_micro, f"a step has {many} of {grouping.rows} rows; give fewer workers, or more tokens_per_step"
