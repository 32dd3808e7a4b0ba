"""Two interpreters of a program: overlapped (one or several threads per lane) and plain (in order, one thread).

Both perform the same operations on the same buffers, so both give the same bits; a test holds them to it. Nothing here can wait
forever: each dependency points to an earlier operation, and the first failure anywhere wakes everyone.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue

from headrace.flow.run.watch import Watch
from headrace.machine.protocol import DeviceEvent, Machine
from headrace.terms.errors import StepFailed
from headrace.terms.events import OpDone, Sink
from headrace.terms.lanes import Lane
from headrace.terms.program import Op, Program

Perform = Callable[[Op], None]

# How many operations a lane's thread may have issued to a device that are not finished. Two keep the device busy. Without a
# bound the host would run ahead of it through a whole step, and allocate memory for all of it.
_IN_FLIGHT = 2


class _Completion:
    """Set when an operation is issued; carries the device's event where the operation may finish later.

    It is a bare lock, held until then: an event object takes ten times the memory, and each operation of two steps has one.
    """

    __slots__ = ("_is_set", "_unissued", "device_event")

    def __init__(self) -> None:
        self._unissued = threading.Lock()
        self._unissued.acquire()
        self._is_set = False
        self.device_event: DeviceEvent | None = None

    def set(self, device_event: DeviceEvent | None = None) -> None:
        """Let all who wait go on. Setting twice is harmless, unless two threads do it at once."""
        self.device_event = device_event
        if not self._is_set:  # `locked` would not tell: a waiting thread holds the lock for a moment
            self._is_set = True
            self._unissued.release()

    def wait(self) -> None:
        with self._unissued:
            pass


@dataclass
class ProgramRun:
    """One program under way."""

    program: Program
    perform: Perform
    step: int
    previous: "ProgramRun | None"
    done: list[_Completion] = field(default_factory=list)

    def wait(self) -> None:
        """Block until every operation is finished."""
        for completion in self.done:
            completion.wait()
            if completion.device_event is not None:
                completion.device_event.synchronize()


@dataclass(frozen=True, slots=True)
class _Issued:
    """An operation in the queue of a lane of the device, between two events."""

    run: ProgramRun
    op: Op
    begin: DeviceEvent
    end: DeviceEvent


class Interpreter:
    """What both interpreters share: performing one operation and telling the sink."""

    def __init__(self, machine: Machine, sink: Sink | None = None) -> None:
        self._machine, self._sink = machine, sink
        self._watch = None if sink is None else Watch(sink)
        self._last: ProgramRun | None = None
        self._issued: dict[Lane, deque[_Issued]] = {lane: deque() for lane in Lane}  # each is used by its lane's thread alone
        self.failure: BaseException | None = None
        self.on_failure: Callable[[BaseException], None] = lambda failure: None  # called by the thread that failed

    def run(self, program: Program, perform: Perform, step: int) -> ProgramRun:
        """Start `program` after the last one; return when this thread's part (compute) is issued and successful."""
        raise NotImplementedError

    def wait(self) -> None:
        """Block until everything that was started is finished; raise if anything failed."""
        if self._last is not None:
            self._last.wait()
        self.check()

    def check(self) -> None:
        """Raise `StepFailed`, with the first failure as its cause, if there is one."""
        if self.failure is not None:
            raise StepFailed(f"the step failed: {self.failure}; the last committed step is untouched") from self.failure

    def fail(self, failure: BaseException) -> None:
        """Run nothing more: queued operations end undone, and waits, now or later, raise the first failure."""
        self.failure = self.failure or failure
        self.on_failure(failure)

    def close(self) -> None:
        """End the interpreter's threads."""
        if self._watch is not None:
            self._watch.close()

    def _begin(self, program: Program, perform: Perform, step: int) -> ProgramRun:
        self.check()
        if self._last is not None and self._last.previous is not None:
            self._last.previous.wait()
            self._last.previous = None
            self.check()
        run = ProgramRun(program, perform, step, self._last, [_Completion() for _ in program.ops])
        self._last = run
        return run

    def _execute(self, run: ProgramRun, op: Op) -> None:
        done = run.done[op.index]
        try:
            for completion in self._dependencies(run, op):
                completion.wait()
                if completion.device_event is not None:
                    self._machine.wait(completion.device_event, op.lane)
            if self.failure is not None:
                return
            with self._watched(op):
                self._finish(op.lane, _IN_FLIGHT - 1)
                begin, start = self._machine.record(op.lane), time.perf_counter()
                with self._machine.lane(op.lane):
                    run.perform(op)
                    done.device_event = self._machine.record(op.lane)
            if begin is not None and done.device_event is not None:
                self._issued[op.lane].append(_Issued(run, op, begin, done.device_event))
            else:
                self._account(run, op, start, time.perf_counter())
        except BaseException as failure:
            self.fail(failure)
            if op.lane is Lane.COMPUTE:
                raise
        finally:
            done.set(done.device_event)

    @contextmanager
    def _watched(self, op: Op) -> Iterator[None]:
        if self._watch is None:
            yield
            return
        self._watch.begin(op)
        try:
            yield
        finally:
            self._watch.end()

    def _finish(self, lane: Lane, remaining: int = 0) -> None:
        """Wait until at most `remaining` operations of `lane` are under way on the device; report those that ended."""
        issued = self._issued[lane]
        while len(issued) > remaining:
            ended = issued.popleft()
            ended.end.synchronize()
            self._account(ended.run, ended.op, ended.begin.reached_seconds(), ended.end.reached_seconds())

    def _dependencies(self, run: ProgramRun, op: Op) -> list[_Completion]:
        waits = [run.done[index] for index in op.after]
        if op.after_previous and run.previous is not None:
            waits += [run.previous.done[index] for index in op.after_previous]
        return waits

    def _account(self, run: ProgramRun, op: Op, start: float, stop: float) -> None:
        if self._sink is not None:
            self._sink(
                OpDone(
                    step=run.step,
                    label=op.label,
                    verb=op.act,
                    lane=op.lane,
                    unit=op.unit,
                    micro=op.micro,
                    chunk=op.chunk,
                    start_seconds=start,
                    stop_seconds=stop,
                    bytes=op.bytes,
                )
            )


class PlainInterpreter(Interpreter):
    """Runs every operation in program order on the calling thread."""

    def run(self, program: Program, perform: Perform, step: int) -> ProgramRun:
        """Perform all operations; nothing is under way afterwards."""
        run = self._begin(program, perform, step)
        for op in program.ops:
            self._execute(run, op)
            self.check()
            self._finish(op.lane)
        return run


class OverlappedInterpreter(Interpreter):
    """One queue per lane; the calling thread is the compute lane, other lanes have as many threads as the table of lanes says.

    A lane with several threads still *starts* its operations in order; it only does not wait for one to finish before it starts
    the next. The program states every dependency, so this is safe.
    """

    def __init__(self, machine: Machine, sink: Sink | None = None) -> None:
        super().__init__(machine, sink)
        self._queues: dict[Lane, SimpleQueue[tuple[ProgramRun, Op] | None]] = {}
        self._threads: list[threading.Thread] = []
        for lane in Lane:
            if lane is Lane.COMPUTE:
                continue
            self._queues[lane] = SimpleQueue()
            for number in range(lane.row.threads):
                thread = threading.Thread(target=self._serve, args=(lane,), name=f"headrace {lane} {number}", daemon=True)
                thread.start()
                self._threads.append(thread)

    def run(self, program: Program, perform: Perform, step: int) -> ProgramRun:
        """Queue the other lanes' operations and perform compute's here; the others may go on after the return."""
        run = self._begin(program, perform, step)
        num_queued = 0
        try:
            for op in program.ops:
                if op.lane is not Lane.COMPUTE:
                    self._queues[op.lane].put((run, op))
                num_queued += 1
            for op in program.lane(Lane.COMPUTE):
                self._execute(run, op)
                self.check()
            self._finish(Lane.COMPUTE)
        except BaseException as failure:
            # It stopped in the middle: other lanes must not wait for operations that will not be done.
            self.fail(failure)
            for op in program.ops:
                if op.lane is Lane.COMPUTE or op.index >= num_queued:
                    run.done[op.index].set()
            raise
        return run

    def close(self) -> None:
        """End all lanes after they have done what is queued."""
        for thread_lane, queue in self._queues.items():
            for thread in self._threads:
                if thread.name.startswith(f"headrace {thread_lane} "):
                    queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        super().close()

    def _serve(self, lane: Lane) -> None:
        queue = self._queues[lane]
        while (item := queue.get()) is not None:
            run, op = item
            self._execute(run, op)
            del item, run, op  # a finished run must not be kept alive by an idle lane
            if queue.empty():
                self._settle(lane)
        self._settle(lane)

    def _settle(self, lane: Lane) -> None:
        """Report what an idle lane left on the device."""
        try:
            self._finish(lane)
        except BaseException as failure:  # the device failed after the operation was issued
            self.fail(failure)


def interpreter_of(name: str, machine: Machine, sink: Sink | None) -> Interpreter:
    """Return the interpreter `name`: overlapped or plain."""
    return (OverlappedInterpreter if name == "overlapped" else PlainInterpreter)(machine, sink)
