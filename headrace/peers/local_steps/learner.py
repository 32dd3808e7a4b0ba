"""A learner's run: it trains by itself on the rows that a node deals, and meets the node between them.

The run is whole: states on its own SSDs, each step committed. If the node is away, it goes on to the end of its rows; if it is
killed itself, it goes on from its last step when it comes again.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from headrace.files.durable import write_whole
from headrace.files.scratch import remove_tree
from headrace.peers.local_steps.engine import Learner
from headrace.peers.local_steps.number_file import NumberFile
from headrace.peers.local_steps.talk import NODE, file_digests_of, receive_batches, receive_files, receive_units, send_units
from headrace.peers.meet.generation import Generation
from headrace.peers.meet.member import Member
from headrace.peers.meet.proof import nonce
from headrace.peers.meet.same_run import refuse_other_options
from headrace.report import Reporter
from headrace.runs.engines import discard, state_of
from headrace.runs.protocols import Display, StateKind
from headrace.store import RunLock
from headrace.terms.closing import Closing
from headrace.terms.errors import ConfigError, PeerLost, RunDirectoryError, Unlike
from headrace.terms.events import Event, Notice
from headrace.terms.options.options import Options
from headrace.update.sites.travel import TRAVELS

_MOST_LEARNERS = 64  # of one run in one directory
_OWN = ("host_memory", "device_memory", "machine", "ssd")


class Learning(Closing):
    """A learner's part of a run, over all its meetings with the node. `own` has this process's budgets. Options in `asked` must
    be the node's. Its `model` is taken if it is the node's, which sends its own otherwise.

    Raises:
        ConfigError: no SSD is named.
    """

    def __init__(
        self, own: Options, display: Display, asked: Mapping[str, Any] | None = None, model: Path | None = None
    ) -> None:
        if not own.budget.ssd:
            raise ConfigError("ssd: a learner keeps a run of its own; give --ssd DIRECTORY")
        self._own, self._display, self._asked, self._model = own, display, asked or {}, model
        self._engine: Learner | None = None
        self._home: _Home | None = None
        self._at: dict[str, Any] = {}
        self._batches: Sequence[Mapping[str, torch.Tensor]] = ()
        self._travel = TRAVELS["bfloat16"]
        self.steps_done = 0

    def attend(self, member: Member, generation: Generation) -> None:
        """Train for the node until its run is over.

        Raises:
            PeerLost: the node is gone; come again.
            ConfigError: the model cannot be trained here.
        """
        told = generation.down.receive_message(NODE)
        self._travel = TRAVELS[told["travel"]]
        home = self._home = self._home or _Home.of(self._own.budget.ssd[0], told["run_id"])
        refuse_other_options(self._asked, told["options"])
        self._get_model(home, generation, told["files"])
        engine = self._engine = self._engine or self._open(home, told["options"])
        generation.up.send_message({"digest": engine.masters.digest}, NODE)
        answer = generation.down.receive_message(NODE)
        if not answer["alike"]:
            raise ConfigError("node: the model has other parameters here; install the node's versions of packages")
        self._display.say(f"learner  {answer['learner']}; has taken {engine.step_index} steps")
        reporter = self._display.progress(int(told["total_steps"]))
        try:
            while self._take_steps(engine, member, reporter) and self._push(engine, generation):
                if not self._ask(engine, generation):
                    break
        finally:
            reporter.close()
        engine.remove_state()
        home.remove()

    def _get_model(self, home: "_Home", generation: Generation, files: Mapping[str, int]) -> None:
        """Say who this is, and have the node's model in the learner's folder: its files, or a link to those that are here."""
        words = {"peer": home.peer, "wants_files": not home.model.exists()}
        words["wants_sums"] = words["wants_files"] and self._model is not None
        generation.up.send_message(words, NODE)
        if words["wants_sums"]:
            assert self._model is not None, "there is one"
            sums = generation.down.receive_message(NODE)
            here = {name: self._model / name for name in sums if (self._model / name).is_file()}
            words["wants_files"] = file_digests_of(here) != sums
            if words["wants_files"]:
                self._display.say(f"{self._model}: is another model than the node's, which is fetched")
            else:
                home.model.unlink(missing_ok=True)  # a link to what is gone
                home.model.symlink_to(self._model.resolve())
            generation.up.send_message(words, NODE)
        if words["wants_files"]:
            receive_files(generation.down, files, home.model)

    def _open(self, home: "_Home", options: Mapping[str, Any]) -> Learner:
        """Open the learner's run, or begin it with the model as the node began."""

        def tell(event: Event) -> None:
            if isinstance(event, Notice):
                self._display.say(f"note: {event.text}" if event.level == "warning" else event.text)

        if state_of(home.run) is StateKind.COMMITTED:
            engine = Learner.resume(home.run, sink=tell)
        else:
            discard(home.run)
            own = {key: getattr(self._own, key) for key in _OWN}
            values = {**options, **own, "output": home.run, "plan": None}
            engine = Learner.open(home.model, Options.of(values, source="the node's options"), tell)
        if engine.position is None:
            home.base(0, engine.masters.counts).write(engine.numbers())
            engine.note({"version": 0, "lot": None})
        self._at = dict(engine.position)
        return engine

    # -- between meetings -----------------------------------------------------------------------------------------------

    def _take_steps(self, engine: Learner, member: Member, reporter: Reporter) -> bool:
        """Take the steps of the present lot that are left; return False where the run is over meanwhile."""
        schedule, rate = engine.options.schedule, engine.options.learning_rate
        while self._batches and self._at["step"] < self._at["steps"]:
            with suppress(PeerLost):  # that is seen when this learner has something to say
                if member.is_over:
                    return False
            at, batch = self._at, self._batches[self._at["step"]]
            trained = int((batch["labels"][:, 1:] >= 0).sum())
            after = {**at, "step": at["step"] + 1}
            factor = schedule.factor(at["first_step"] + at["step"])
            result = engine.step(batch, position=after, learning_rate=rate * factor)
            # A deferred commit comes later, so its position has this step's loss, too.
            after.update(loss_sum=at["loss_sum"] + result.loss * trained, trained=at["trained"] + trained)
            self._at, self.steps_done = after, self.steps_done + 1
            reporter(replace(result, step=engine.step_index))
        return True

    # -- at a meeting ---------------------------------------------------------------------------------------------------

    def _push(self, engine: Learner, generation: Generation) -> bool:
        """Send what was learned of a lot that is done."""
        at = self._at
        if at["lot"] is None or at["step"] < at["steps"]:
            return True
        assert self._home is not None, "it has learned something"
        loss = at["loss_sum"] / max(1, at["trained"])
        generation.up.send_message({"do": "push", "lot": at["lot"], "loss": loss}, NODE)
        reason = generation.down.receive_message(NODE)["refused"]
        if reason is None:
            push = self._pushed(engine, self._home, at)
            with suppress(Unlike):  # the node says so
                send_units(generation.up, NODE, (push.read(unit) for unit in range(len(push.counts))))
            reason = generation.down.receive_message(NODE)["refused"]
        if reason is not None:
            self._display.say(f"what was learned of lot {at['lot']} is not merged: {reason}")
        self._at, self._batches = {"version": at["version"], "lot": None}, ()
        engine.note(self._at)
        self._home.forget_push(at["lot"])
        return True

    def _pushed(self, engine: Learner, home: "_Home", at: Mapping[str, Any]) -> NumberFile:
        """Return the file with what was learned of a lot as it travels; it is made once, however often it is sent."""
        counts, travel = engine.masters.counts, self._travel
        push = NumberFile(home.push(at["lot"]), travel.sizes(counts), travel.dtype)
        if push.exists:
            return push
        before = [NumberFile(path, counts) for path in home.errors()]
        with ExitStack() as files:
            add = files.enter_context(push.writing())
            error = NumberFile(home.error(at["lot"]), counts)
            keep = files.enter_context(error.writing()) if travel.feeds_back else lambda numbers: None
            for values, left in engine.displacement(home.base(at["version"], counts), travel, before[-1] if before else None):
                add(values)
                keep(left)
        return push

    def _ask(self, engine: Learner, generation: Generation) -> bool:
        """Wait for rows, and begin with the weights that they come with; return False where the run is over."""
        at, down = self._at, generation.down
        generation.up.send_message({"do": "ask", "held": at["version"], "lot": at["lot"]}, NODE)
        answer = down.receive_message(NODE, {"over": bool})
        if (reason := answer.get("refused")) is not None:
            raise ConfigError(
                f"node: this learner gets no more rows: {reason}; find out why, and begin again with another --ssd, "
                f"or an empty one"
            )
        if answer["over"]:
            return False
        words = down.receive_message(NODE)
        self._receive(engine, generation, words)
        self._batches = receive_batches(down)
        if words["lot"] == at["lot"]:
            return True  # it is at work on it
        self._at = {
            "version": words["base"],
            "lot": words["lot"],
            "step": 0,
            "steps": len(self._batches),
            "first_step": words["first_step"],
            "loss_sum": 0.0,
            "trained": 0,
        }
        assert self._home is not None, "it has weights"
        engine.adopt(self._home.base(words["base"], engine.masters.counts), self._at)
        self._home.keep_base(words["base"])
        return True

    def _receive(self, engine: Learner, generation: Generation, words: Mapping[str, Any]) -> None:
        """Receive the weights of a version: whole, or one change after the other."""
        assert self._home is not None, "it has weights"
        counts, down = engine.masters.counts, generation.down
        if words["whole"]:
            self._home.base(words["base"], counts).write(receive_units(down, NODE, counts, "float32"))
            return
        for version in words["versions"]:
            changes = receive_units(down, NODE, self._travel.sizes(counts), self._travel.dtype)
            self._home.base(version, counts).write(self._changed(self._home.base(version - 1, counts), changes))

    def _changed(self, before: NumberFile, changes: Iterator[NDArray[Any]]) -> Iterator[NDArray[Any]]:
        for unit, change in enumerate(changes):
            numbers = torch.from_numpy(before.read(unit))
            yield numbers.add_(self._travel.decode(change, numbers.numel())).numpy()

    def close(self) -> None:
        """Make the newest step durable. A second call does nothing."""
        if self._engine is not None:
            self._engine.close()
        if self._home is not None:
            self._home.close()


class _Home(Closing):
    """A learner's folder: the node's model, its own run, and the numbers with which it began. One process has it at a time.

    `peer` is who it is, also when it comes again.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._lock = folder, RunLock(folder)
        self.model, self.run = folder / "model", folder / "run"
        peer = folder / "peer"
        if not peer.exists():
            write_whole(peer, nonce())
        self.peer = peer.read_text(encoding="utf-8")

    @classmethod
    def of(cls, directory: Path, run_id: str) -> "_Home":
        """Return the first folder for this run in `directory` that no other process has.

        Raises:
            RunDirectoryError: all are in use.
        """
        for number in range(1, _MOST_LEARNERS + 1):
            with suppress(RunDirectoryError):
                return cls(directory.absolute() / f"headrace-learner-{run_id}-{number}")
        raise RunDirectoryError(f"{directory}: {_MOST_LEARNERS} learners of this run are at work there; name another --ssd")

    def base(self, version: int, counts: tuple[int, ...]) -> NumberFile:
        """Return the file with the numbers of a version."""
        return NumberFile(self._folder / f"base-{version}", counts)

    def push(self, lot: int) -> Path:
        """What was learned of a lot, as it travels."""
        return self._folder / f"push-{lot}"

    def error(self, lot: int) -> Path:
        """What rounding of that push leaves for the next."""
        return self._folder / f"error-{lot}"

    def errors(self) -> list[Path]:
        """Return the errors that are kept, the newest last."""
        return sorted(self._folder.glob("error-*[0-9]"), key=lambda path: int(path.name.partition("-")[2]))

    def forget_push(self, lot: int) -> None:
        """Remove a push that was sent, and what older ones left."""
        self.push(lot).unlink(missing_ok=True)
        for path in self.errors()[:-1]:
            path.unlink()

    def keep_base(self, version: int) -> None:
        """Remove the numbers of all other versions."""
        for path in self._folder.glob("base-*"):
            if path.name != f"base-{version}":
                path.unlink()

    def remove(self) -> None:
        """Remove everything."""
        remove_tree(self._folder)
        self.close()

    def close(self) -> None:
        """Let other processes have the folder."""
        self._lock.release()
