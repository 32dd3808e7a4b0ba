"""How an engine goes on under another plan, between two steps.

Invariant: the bits of a run do not change, and its memory is never above that of the plan before or the plan after. The step
before is committed first, under the plan before. So whatever ends the process in between, the run can be resumed.
"""

from typing import Any

from headrace.ask.planner import RunPlanner
from headrace.plan.buffer_sizes import scratch_bytes
from headrace.plan.given import refuse_other_bits
from headrace.plan.plan import Plan
from headrace.store import StateStore
from headrace.terms.errors import ConfigError, DiskFull
from headrace.terms.events import Notice, Sink


class Replanning:
    """The part of an engine that changes its plan. `_keeps_plan` says why this kind of engine does not; "" where it does."""

    plan: Plan | None
    store: StateStore
    _keeps_plan = ""
    _planner: RunPlanner
    _emit: Sink
    flush: Any
    _drop_buffers: Any

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
        self._rest()
        return self._take(self._planner.adopt(plan, now, self.store.manifest))

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

    def _rest(self) -> None:
        """Commit the newest step and free the buffers: what finds another plan has memory in neither."""
        self.flush()
        self._drop_buffers()

    def _take(self, plan: Plan) -> bool:
        """Put a plan into use whose buffers the next step makes. Those of the plan before are gone."""
        try:
            self.store.grow_scratch(scratch_bytes(plan))
        except DiskFull as full:
            self._emit(Notice(text=f"the plan stays as it was: another one needs more space ({full})"))
            return False
        self.plan = plan
        return True
