"""A worker or a learner: it computes for a node until the node's run is done, and comes back after a break."""

import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headrace
from headrace.files.scratch import remove_tree, scratch
from headrace.machine.meter import MemoryMeter
from headrace.peers.meet.address import Address
from headrace.peers.meet.generation import Generation
from headrace.peers.meet.listener import APART
from headrace.peers.meet.member import Member
from headrace.peers.meet.proof import nonce
from headrace.peers.meet.same_run import WORKERS_OWN, lost_peer
from headrace.runs.protocols import Display, NoDisplay
from headrace.store import leftovers_of, remove_leftover
from headrace.terms.closing import Closing
from headrace.terms.errors import ConfigError, HeadraceError, PeerLost, RunDirectoryError, StorageError
from headrace.terms.options.options import Options
from headrace.terms.options.run_options import NodeOptions
from headrace.terms.sizes import format_bytes

if TYPE_CHECKING:
    from headrace.peers.local_steps.learner import Learning

# Seconds that a worker waits for a node that is not there, or not there any more.
WAIT_SECONDS = 600.0
_RETRY_SECONDS = 0.2
_SCRATCH = "headrace-worker-"


def work(
    address: Address,
    own: Options,
    *,
    name: str,
    display: Display | None = None,
    secret: bytes | None = None,
    wait_seconds: float = WAIT_SECONDS,
    asked: Mapping[str, Any] | None = None,
    model: Path | None = None,
) -> int:
    """Compute for the node at `address` until its run is done, and return the number of steps computed here.

    `own` has this process's budgets. If the node is not there, it is waited for, up to `wait_seconds`. `asked` are options that
    must be the node's (`deciding_options`). A learner takes its `model`, if it is the node's.

    Raises:
        PeerLost: there has been no node for that long.
        ConfigError: the node refuses this worker, or its run has other options than `asked`.
    """
    display = display or NoDisplay()
    seen, told = time.monotonic(), ""
    with MemoryMeter() as meter, _Peer(address, own, name, display, secret, asked or {}, model) as me:
        while True:
            try:
                me.meet()
                peak = format_bytes(meter.peak_bytes())
                display.say(f"done: {me.steps} steps were taken here, with {peak} of host memory at most")
                return me.steps
            except _Parted as parted:
                words, met = str(parted), parted.met
            if met:
                seen = time.monotonic()
            if time.monotonic() - seen > wait_seconds:
                raise PeerLost(f"{words}; waited {wait_seconds:g} s: start the node, or give --wait more")
            if words != told:
                display.say(f"{words}; waiting for it")
                told = words
            time.sleep(_RETRY_SECONDS)


class _Parted(Exception):
    """The node is gone; `met`: it was there."""

    def __init__(self, words: str, *, met: bool) -> None:
        super().__init__(words)
        self.met = met


def deciding_options(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return those options in a run's file that decide numbers, in the form of a run's record; `source` is named in errors.

    Raises:
        ConfigError: as for `NodeOptions.of`.
    """
    found, compared = NodeOptions.of(values, source=source).to_json(), set(Options.fixed_keys()) - WORKERS_OWN
    return {key: found[key] for key in sorted(values.keys() & compared)}


class _Peer(Closing):
    """A worker or a learner, over all its meetings with the node: what the node wants it for, it says when they meet. `steps`
    are those that were taken here.
    """

    def __init__(
        self,
        address: Address,
        own: Options,
        name: str,
        display: Display,
        secret: bytes | None,
        asked: Mapping[str, Any],
        model: Path | None,
    ) -> None:
        self._address, self._own, self._name, self._display = address, own, name, display
        self._secret, self._asked, self._model, self._peer = secret, asked, model, nonce()
        self._learning: Learning | None = None
        self._steps = 0

    @property
    def steps(self) -> int:
        """Steps taken here so far."""
        return self._steps + (self._learning.steps_done if self._learning else 0)

    def meet(self) -> None:
        """Work until the run is done.

        Raises:
            _Parted: the node is gone.
        """
        words, reason, again = "", "has left", False
        try:
            member = Member(self._address, name=self._name, version=headrace.__version__, secret=self._secret, peer=self._peer)
        except PeerLost as lost:
            raise _Parted(str(lost), met=False) from None
        try:
            self._display.say(f"node {self._address}: joined; waiting to be given work")
            generation = member.enter(tell=lambda words: self._display.say(f"waits as a spare: {words}"))
            if generation is not None:
                self._learn(member, generation) if member.shape == APART else self._compute(generation)
            return
        except HeadraceError as error:
            lost_one = lost_peer(error)
            if lost_one is None:
                reason = f"cannot go on: {error}"
                raise
            member.check()
            words, again = member.why_dropped() or str(lost_one), True
        finally:
            with suppress(PeerLost):
                member.close(reason, again=again)
        raise _Parted(words, met=True)

    def _learn(self, member: Member, generation: Generation) -> None:
        from headrace.peers.local_steps.learner import Learning  # late, because it imports the model library

        self._learning = self._learning or Learning(self._own, self._display, self._asked, self._model)
        self._learning.attend(member, generation)

    def _compute(self, generation: Generation) -> None:
        from headrace.peers.node.worker import Worker

        own, display = self._own, self._display
        with (
            scratch(own.budget.ssd[0] if own.budget.ssd else Path(tempfile.gettempdir()), _SCRATCH, _discard) as folder,
            Worker(generation, own, folder, lambda event: None, self._asked) as worker,
        ):
            plan = worker.plan
            which = f"worker   {generation.rank} of {generation.num_workers}"
            display.say(
                "\n".join([f"{which}; micro-batches of {plan.batch.micro_batch_sequences} rows", *plan.results.explain_peaks()])
            )
            reporter = display.progress(worker.total_steps)
            worker.listen(reporter)
            try:
                worker.work()
            finally:
                self._steps += worker.steps_done
                reporter.close()

    def close(self) -> None:
        """End what a learner has open. A second call does nothing."""
        if self._learning is not None:
            self._learning.close()


def _discard(folder: Path) -> None:
    """Remove what a killed worker left: its store's files on its drives, and then the directory that knows of them."""
    with suppress(RunDirectoryError, StorageError, ConfigError):
        for leftover in leftovers_of(folder):
            remove_leftover(leftover)
    remove_tree(folder)
