"""How an engine goes on under another plan, between two steps.

Invariant: the bits of a run do not change, and its memory is never above that of the plan before or the plan after. The step
before is committed first, under the plan before. So whatever ends the process in between, the run can be resumed.
"""

import threading
from dataclasses import dataclass

from headrace.ask.planner import RunPlanner
from headrace.plan.forecast.forecast import forecast
from headrace.plan.forecast.own_rates import Seen, is_worth_taking, machine_of_steps
from headrace.plan.search.given import refuse_other_bits
from headrace.plan.search.search import nominal_machine_of
from headrace.plan.value.buffer_sizes import scratch_bytes
from headrace.plan.value.plan import Plan
from headrace.store import StateStore
from headrace.terms.errors import ConfigError, DiskFull, PlanInfeasible
from headrace.terms.events import NO_STEP, Event, Notice, OpDone, Sink
from headrace.terms.lanes import Lane, lane_named
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.options import Options

# How often a run takes another plan because its steps showed how fast its machine is, and the record's name for what is left.
MOST_REPLANS = 2
REPLANS_LEFT = "replans_left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """Another plan is in use. By the rates of `machine`, which steps showed, a step takes `seconds`, and took `seconds_before`
    under the plan before.
    """

    plan: Plan
    machine: Ceilings
    seconds: float
    seconds_before: float


class LaneTotals:
    """A sink that adds up what each lane did in the steps since `restart`, and passes all events on. Lanes may call it at once.

    A lane with several threads counts as one that is busy while any of them is. Operations are told as they end: of a short one
    that began and ended within a long one nothing is lost, but what the long one took before it is.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink, self._lock = sink, threading.Lock()
        self._lanes: dict[Lane, list[float]] = {}  # seconds, bytes, operations, and when the last of them ended
        self._steps = set[int]()
        self._first: int | None = None

    def __call__(self, event: Event) -> None:
        """Count an operation."""
        if isinstance(event, OpDone) and event.step != NO_STEP and (lane := lane_named(event.lane)) is not None:
            with self._lock:
                self._count(lane, event)
        self._sink(event)

    def restart(self) -> None:
        """Forget everything. The next step does not count: kernels compile in it, and buffers are filled."""
        with self._lock:
            self._lanes.clear()
            self._steps.clear()
            self._first = None

    def seen(self) -> tuple[dict[Lane, Seen], int]:
        """Return what each lane did, and in how many steps."""
        with self._lock:
            found = {lane: Seen(seconds, int(size), int(count)) for lane, (seconds, size, count, _) in self._lanes.items()}
            return found, len(self._steps)

    def _count(self, lane: Lane, op: OpDone) -> None:
        if self._first is None:
            self._first = op.step
        if op.step == self._first:
            return
        self._steps.add(op.step)
        totals = self._lanes.setdefault(lane, [0.0, 0, 0, float("-inf")])
        totals[0] += max(0.0, op.stop_seconds - max(op.start_seconds, totals[3]))
        totals[1] += op.bytes
        totals[2] += 1
        totals[3] = max(totals[3], op.stop_seconds)


class Replanning:
    """The part of an engine that changes its plan. `_keeps_plan` says why this kind of engine does not; "" where it does."""

    options: Options
    plan: Plan | None
    store: StateStore
    _keeps_plan = ""
    _planner: RunPlanner
    _emit: Sink
    _lanes: LaneTotals | None  # None: nobody listens to operations
    _replans_left: int

    def rest(self) -> None:
        """Finish everything under way and free the buffers: what finds another plan, or exports, has memory in neither."""
        raise NotImplementedError

    def take_plan(self, plan: Plan) -> bool:
        """Go on under `plan` from the next step on. Return whether it is taken: without space for what it keeps on the drives,
        the plan before stays, and the sink is told.

        The newest step is made durable first. The bits of the run stay the same: a plan that would change them is refused.

        Raises:
            ConfigError: a run cannot go on under `plan`, or this kind of engine keeps its plan; nothing has changed.
            PlanInfeasible: `plan` takes more than the budgets allow; the plan before stays.
            StepFailed: a lane failed; the last committed step is untouched.
        """
        now = self._plan_to_leave()
        refuse_other_bits(plan, now)
        self.rest()
        return self._take(self._planner.adopt(plan, now, self.store.manifest))

    def plan_again(self) -> Replanned | None:
        """Look for a plan by the rates of the steps since the last change, and go on under it if it is forecast a tenth faster.
        Return what is changed; None if the plan stays.

        A run does so twice at most, and never under a plan that was given. An engine without a sink has heard of no operation.

        Raises:
            StepFailed: a lane failed; the last committed step is untouched.
        """
        if self._keeps_plan or not self._replans_left or self._lanes is None:
            return None
        now, (seen, steps) = self.plan, self._lanes.seen()
        if now is None or not steps:
            return None
        self.rest()
        assumed = self.options.machine if isinstance(self.options.machine, Ceilings) else nominal_machine_of(now)
        machine = machine_of_steps(now, assumed, seen, steps)
        try:
            plan = self._planner.plan_again(now, machine, self.store.manifest)
            refuse_other_bits(plan, now)
        except (PlanInfeasible, ConfigError):
            return None
        seconds = is_worth_taking(plan, now, machine, seen)
        if seconds is None or not self._take(plan):
            return None
        self._replans_left -= 1
        before = forecast(now, machine).step_seconds
        return Replanned(plan=plan, machine=machine, seconds=seconds, seconds_before=before)

    def _plan_to_leave(self) -> Plan:
        """Return the plan in use.

        Raises:
            ConfigError: this engine keeps its plan, or has none yet.
        """
        if self._keeps_plan:
            raise ConfigError(f"plan: {self._keeps_plan}")
        if self.plan is None:
            raise ConfigError("plan: the engine has none yet; take the first step, or open it with tokens_per_step")
        return self.plan

    def _take(self, plan: Plan) -> bool:
        """Put a plan into use whose buffers the next step makes. Those of the plan before are gone."""
        try:
            self.store.grow_scratch(scratch_bytes(plan))
        except DiskFull as full:
            self._emit(Notice(text=f"the plan stays as it was: another one needs more space ({full})"))
            return False
        self.plan = plan
        if self._lanes is not None:
            self._lanes.restart()
        return True
