"""A node whose learners train by themselves: it deals rows, merges what they learned, and owns the run.

Invariant: learners may come, go and die at any time; what they learned is merged, or named as lost in `merges.jsonl`.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.data import BatchStream
from headrace.data.batches.open_data import open_stream
from headrace.model import Checkpoint
from headrace.model.written.export import files_beside_weights
from headrace.peers.local_steps.broker import Broker
from headrace.peers.local_steps.ledger import read_journal
from headrace.peers.local_steps.outer import OuterState, outer_options
from headrace.peers.local_steps.rounds import ByQuorum, Replayed, Rounds
from headrace.peers.local_steps.session import Session, Told
from headrace.peers.meet.generation import Generation
from headrace.peers.meet.listener import Listener
from headrace.report import MetricsFile, Reporters
from headrace.runs.checkpoints import Checkpoints
from headrace.runs.engines import discard, headrace_engines, state_of
from headrace.runs.evaluating import Evaluations
from headrace.runs.finish import write_final
from headrace.runs.loop import Finished
from headrace.runs.prepare import check, default_output, prepare
from headrace.runs.protocols import Display, StateKind
from headrace.runs.signals import Interrupted, StopRequest
from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import HeadraceError, PeerLost, RunDirectoryError, in_one_line
from headrace.terms.events import Event, Notice, StepResult
from headrace.terms.options.run_options import NodeOptions
from headrace.update.sites.travel import TRAVELS

_LOOK_SECONDS = 0.05
# Who waits longer than this says for whom.
_WAIT_SECONDS = 10.0
# In the run directory: what learners pushed, and what they are sent.
EXCHANGE_NAME = "exchange"


def serve_learners(
    config: NodeOptions, listener: Listener, display: Display, refuse: Callable[[RunDirectory, NodeOptions], None]
) -> Finished:
    """Run `config`, or go on with it in `output`, until the last merge; `refuse` refuses another run there.

    Raises: as `train` and `resume`.
    """
    directory = RunDirectory(Path(config.output or default_output(config)).absolute())
    if directory.config.exists():
        refuse(directory, config)
        found = directory.read_config()
        stream = open_stream(found, resumed=True)
    else:
        checked, directory = check(config)
        found, batches = prepare(checked, directory, headrace_engines())
        assert isinstance(batches, BatchStream), "streaming is refused where learners train by themselves"
        stream = batches
        directory.write_config(found)
    assert isinstance(found, NodeOptions), "it is a node's"
    with _opened(found, directory, display) as state:
        return _Node(found, directory, stream, state, listener, display).run()


@contextmanager
def _opened(config: NodeOptions, directory: RunDirectory, display: Display) -> Iterator[OuterState]:
    """Open the state of the run, or begin it."""

    def tell(event: Event) -> None:
        if isinstance(event, Notice):
            display.say(f"note: {event.text}" if event.level == "warning" else event.text)

    kind = state_of(directory.path)
    if kind is StateKind.COMMITTED:
        state = OuterState.resume(directory.path, tell)
    else:
        discard(directory.path)
        if kind is StateKind.NONE and directory.final.exists():
            raise RunDirectoryError(f"{directory.path}: the run is finished; its model is in {directory.final}")
        options = outer_options(config, config.outer, config.outer_learning_rate)
        state = OuterState.begin(config.model, options, tell, final=directory.final)
    with state:
        yield state


class Waiting:
    """Says for whom everybody waits, once, where that has lasted."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock, self._words, self._since, self._said = say, clock, "", 0.0, ""

    def __call__(self, words: str) -> None:
        """Take for whom everybody waits now, "" for nobody."""
        if words != self._words:
            self._words, self._since = words, self._clock()
        elif words not in ("", self._said) and self._clock() - self._since >= _WAIT_SECONDS:
            self._said = words
            self._say(words)


class _Node:
    def __init__(
        self,
        config: NodeOptions,
        directory: RunDirectory,
        stream: BatchStream,
        state: OuterState,
        listener: Listener,
        display: Display,
    ) -> None:
        assert config.local_steps, "learners train by themselves"
        assert config.max_steps, "it was decided"
        rounds: Rounds = ByQuorum(config.quorum, config.grace)
        if config.replay is not None:
            rounds = Replayed(read_journal(config.replay))
        folder = directory.path / EXCHANGE_NAME
        self._broker = Broker(
            state,
            stream,
            rounds,
            steps=config.local_steps,
            total_steps=config.max_steps,
            folder=folder,
            travel=TRAVELS[config.exchange_dtype],
        )
        self._config, self._directory, self._state, self._display = config, directory, state, display
        self._waiting = Waiting(display.say)
        self._listener, self._threads, self._merged_seconds = listener, list[threading.Thread](), time.monotonic()
        self._evaluations = Evaluations(config, stream, config.max_steps)
        self._told = Told(
            run_id=state.run_id,
            options=config.to_record(),
            files=_files_of(config.model),
            counts=state.masters.counts,
            digest=state.masters.digest,
            travel=TRAVELS[config.exchange_dtype],
        )

    def run(self) -> Finished:
        """Merge until the last merge, write the model, and let learners go."""
        broker, directory, reporters = self._broker, self._directory, Reporters()
        reporters.add(self._display.progress(broker.total_steps))
        per_epoch = self._evaluations.stream.steps_per_epoch
        metrics = MetricsFile(directory.metrics, committed_steps=broker.steps_done, steps_per_epoch=per_epoch)
        reporters.add(metrics)
        try:
            with StopRequest() as stop:
                while not broker.is_done and stop.received is None and reporters.failure is None:
                    self._take_in()
                    self._tell()
                    if (line := broker.merge_if_due()) is not None:
                        reporters(self._result(line))
                    else:
                        time.sleep(_LOOK_SECONDS)
            if stop.received is not None:
                raise self._interrupted(stop.received)
            reporters.close()
            if reporters.failure is not None:
                raise directory.unwritable(reporters.failure) from reporters.failure
            broker.finish()
            self._listener.tell_over()
            checkpoints = Checkpoints(self._config, self._evaluations)
            write_final(self._state, directory, checkpoints, metrics.records, metrics.evaluations)
            self._listener.dismiss()
        finally:
            reporters.close()
            self._listener.part("the node has ended")
            for thread in self._threads:
                thread.join()
        broker.remove_files()
        if not self._config.keep_state:
            self._state.remove_state()
        self._display.say(f"done: {broker.ledger.version} merges; model in {directory.final}")
        return Finished(run_directory=directory.path, final=directory.final, steps=broker.steps_done)

    def _tell(self) -> None:
        """Say what a person should know: who was refused, what was thrown out, and for whom everybody waits."""
        self._listener.tell_news(self._display.say)
        while self._broker.news:
            self._display.say(self._broker.news.pop(0))
        self._waiting(self._broker.waits_for())

    def _take_in(self) -> None:
        """Begin to serve a learner that waits."""
        if (generation := self._listener.take_in()) is not None:
            thread = threading.Thread(target=self._attend, args=(generation,), name="headrace learner", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _attend(self, generation: Generation) -> None:
        """Serve one learner until it goes, or is lost."""
        name, reason = generation.names[-1], "it has left"
        try:
            Session(self._broker, generation, self._told).run()
        except PeerLost as lost:
            reason = str(lost)
            if not self._broker.is_over:
                self._display.say(f"{lost}; its rows are kept for it until it comes again")
        except Exception as error:  # it sent what makes no sense, or a drive failed: others are served further
            words = str(error) if isinstance(error, HeadraceError) else in_one_line(error)
            reason = f"{name}: cannot be served: {words}"
            self._display.say(reason)
        self._listener.part(reason, generation)

    def _result(self, line: dict[str, Any]) -> StepResult:
        """Return a merge as the reporters see it: a step that stands for all of a learner's since the last one."""
        seconds, self._merged_seconds = time.monotonic() - self._merged_seconds, time.monotonic()
        lots, spec = line["lots"], self._evaluations.stream.spec
        rows = sum(each["rows"][1] - each["rows"][0] for each in lots)
        return StepResult(
            step=self._broker.steps_done,
            loss=sum(each["loss"] * each["weight"] for each in lots),
            grad_norm=line["norm"],
            learning_rate=self._config.outer_learning_rate,
            tokens=rows * spec.sequence_length,
            trained_tokens=sum(each["tokens"] for each in lots),
            seconds=seconds,
            update_policy="merge",
            metrics={"merge": line["version"], "learners": len(lots)},
        )

    def _interrupted(self, number: int) -> Interrupted:
        step, path = self._broker.steps_done, self._directory.path
        return Interrupted(
            f"{signal.Signals(number).name}: stopped after merge {self._broker.ledger.version}, which is committed; resume "
            f"with: headrace resume {path}",
            signal_number=number,
            step=step,
        )


def _files_of(model: Path) -> dict[str, Path]:
    """Return the files that a learner needs, by name."""
    weights = {tensor.path for tensor in Checkpoint.open(model, decode=True).tensors.values()}
    beside = [path for path in files_beside_weights(model) if path.is_file()]
    indices = model.glob("*.index.json")
    return {path.name: path for path in sorted({*beside, *indices, *weights})}
