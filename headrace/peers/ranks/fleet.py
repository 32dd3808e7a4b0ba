"""The ranks of a run that share out every unit, as the engine sees them: `engine.company.Company`."""

from collections.abc import Sequence
from pathlib import Path

from headrace.ask.planner import RunPlanner
from headrace.engine.subject import Subject
from headrace.files import Beside
from headrace.peers.meet.talk import Talk
from headrace.peers.ranks import resharing, sharing
from headrace.plan.value.plan import Plan
from headrace.store import StateStore
from headrace.terms.events import Sink
from headrace.terms.options.options import Options


class Fleet(Talk):
    """What they say to one another is `Talk`'s; `sharing` and `resharing` share out a run at its beginning."""

    def planned_options(self, options: Options) -> Options:
        """See `sharing.planned_options`."""
        return sharing.planned_options(options, self)

    def share_of_step(
        self, planner: RunPlanner, step: tuple[int, int], way: str, *, state: Sequence[Path], beside: Beside | None
    ) -> tuple[int, int]:
        """See `sharing.share_of_step`."""
        return sharing.share_of_step(planner, self, step, way, state=state, beside=beside)

    def shared_plan(self, plan: Plan) -> Plan:
        """See `sharing.shared_plan`."""
        return sharing.shared_plan(plan, self)

    def introduce(self, subject: Subject, store: StateStore, options: Options, plan: Plan | None) -> None:
        """See `sharing.introduce`."""
        sharing.introduce(self, subject, store, options, plan)

    def take_up(
        self,
        run_directory: Path,
        subject: Subject,
        planner: RunPlanner,
        store: StateStore,
        options: Options,
        plan: Plan | None,
        sink: Sink,
    ) -> tuple[StateStore, Plan | None]:
        """See `resharing.taken_up`."""
        return resharing.taken_up(self, run_directory, subject, planner, store, options, plan, sink)
