"""The plan that a run is under: what is said of it, and when its steps show that another one would be faster.

Invariant: `plan.json`, `machine.json` and the summary are about the plan in use.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace.plan.value.plan import Plan
from headrace.runs.protocols import RunningEngine
from headrace.terms.events import Notice, Sink
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.sizes import format_seconds

if TYPE_CHECKING:
    from headrace.runs.account import Account

# After so many steps of this process, and as many under another plan, it is asked whether another one would be faster. The
# search takes some seconds, and the next step fills its buffers anew. With less time left than this, a tenth is not worth it.
_AFTER_STEPS, _LEAST_SECONDS = 5, 300.0


class PlanInUse:
    """The account of a run's plan, which follows the engine. `account_of` makes the account of another plan on a machine."""

    def __init__(
        self,
        account: "Account | None",
        engine: RunningEngine,
        sink: Sink,
        account_of: Callable[[Plan, Ceilings], "Account"],
        *,
        may_change: bool,
    ) -> None:
        """Write the plan into the run directory, and follow it if the run may take another one."""
        self.account, self._engine, self._sink, self._account_of = account, engine, sink, account_of
        self._may_change = account is not None and may_change
        self._since = 0  # steps of this process before the plan in use was taken, or looked for
        if account is not None:
            account.keep_plan()

    def after_step(self, taken: Sequence[float], *, steps_left: int) -> None:
        """Say how long the run takes if that was wrong, and take another plan if one is faster. `taken` has the seconds of this
        process's steps.
        """
        if self.account is None:
            return
        if words := self.account.refined(taken, steps_left=steps_left):
            self._sink(Notice(text=words, level="info"))
        recent = taken[self._since :]
        if not self._may_change or len(recent) != _AFTER_STEPS or statistics.median(recent) * steps_left < _LEAST_SECONDS:
            return
        found = self._engine.plan_again()
        if found is None:  # a plan is not looked for twice by the same figures
            self._may_change = False
            return
        self._since = len(taken)
        self.account = self._account_of(found.plan, found.machine)
        self.account.keep_plan()
        before, after = format_seconds(found.seconds_before), format_seconds(found.seconds)
        self._sink(
            Notice(text=f"another plan from here: {after} a step instead of {before}, by the steps so far", level="info")
        )
