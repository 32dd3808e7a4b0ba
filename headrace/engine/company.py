"""With whom a run is shared out, as the engine sees them: ranks that share out every unit, or stages."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from headrace.ask.planner import RunPlanner
from headrace.files import Beside
from headrace.flow.step.shards import Peers
from headrace.machine.host_memory import Bytes
from headrace.model import Chain
from headrace.plan.value.plan import Plan
from headrace.store import StateStore
from headrace.terms.errors import ConfigError
from headrace.terms.events import Sink
from headrace.terms.options.options import Options
from headrace.terms.shards import Share


class HostCopy(Protocol):
    """Weights that the ranks of one machine have together: whether there are several, how many, and memory of all of them."""

    is_used: bool
    sharers: int

    def map(self, num_bytes: int) -> Bytes:
        """Return memory of all of them."""


class Company(Peers, Protocol):
    """Ranks or stages. They step as `Peers`, or as `peers.stages.line.Line` if `by_stages`. `peers` says how."""

    by_stages: bool

    @property
    def name(self) -> str:
        """What it is called in a run's state."""

    @property
    def terms(self) -> dict[str, Any]:
        """What else the others must know of how the run is shared out."""

    @property
    def share(self) -> Share:
        """What is held here."""

    @property
    def copy(self) -> HostCopy:
        """Weights that the ranks of this machine have together."""

    def settle_on(self, options: Options, planner: RunPlanner, chain: Chain) -> None:
        """Decide how the run is shared out, before it is planned."""

    def agree(self, terms: Mapping[str, Any], options: Options) -> None:
        """Share out as `terms` say."""

    def planned_options(self, options: Options) -> Options:
        """Return the options under which one of them plans."""

    def share_of_step(
        self, planner: RunPlanner, step: tuple[int, int], way: str, *, state: Sequence[Path], beside: Beside | None
    ) -> tuple[int, int]:
        """Return the tokens of the largest share of a step, and their rows' length; fix how sums are grouped."""

    def shared_plan(self, plan: Plan) -> Plan:
        """Return the plan with chunks of which each has some."""

    def introduce(self, subject: Any, store: StateStore, options: Options, plan: Plan | None) -> None:
        """Tell the others about the run that begins. `subject`: an `engine.subject.Subject`."""

    def take_up(
        self,
        run_directory: Path,
        subject: Any,
        planner: RunPlanner,
        store: StateStore,
        options: Options,
        plan: Plan | None,
        sink: Sink,
    ) -> tuple[StateStore, Plan | None]:
        """Have all go on with the run in `store`; return the store and the plan, which are new where others hold it now."""

    def reaching(self, store: StateStore, *, importing: bool = False) -> AbstractContextManager[None]:
        """Let `store` read and write what the others hold."""


def refuse_without_stages(options: Options, fleet: Company | None) -> None:
    """Refuse options that a run without stages would pass over.

    Raises:
        ConfigError: there is one.
    """
    given = [key for key in ("cuts", "stage_dtype") if getattr(options, key)]
    if given and not (fleet and fleet.by_stages):
        raise ConfigError(
            f"{', '.join(given)}: only a run in stages has that; give --stages HOST:PORT,HOST:PORT, or leave it out"
        )
