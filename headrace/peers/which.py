"""Which way to share out a run over a link: a node, stages or local steps, each planned for as many machines alike.

Invariant: seconds are those of each shape's own plan; what a shape cannot do is said in the words with which it is refused.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from headrace.ask.answer import machine_of, plan_model
from headrace.ask.local_rounds import LocalReport
from headrace.peers.node.planning import plan_cluster
from headrace.peers.stages.planning import plan_stages
from headrace.terms.errors import ConfigError, InputError, PlanInfeasible
from headrace.terms.options.plan_options import PlanOptions
from headrace.terms.plain_figures import plain_figure
from headrace.terms.sizes import format_bytes, format_seconds
from headrace.terms.tables import Report, figures, line

# Machines that are compared, and the steps of a round: what DiLoCo was shown with.
MACHINES, LOCAL_STEPS = 4, 100
# Among ways with the bits of one machine a shape must gain so much over one machine alone to be worth its links.
_WORTH_IT = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """A way to share out a run. `tokens_per_second` are those of all machines, None where it is refused or does not fit.

    `is_exact`: it has the bits of one machine. `words` say how a step or round passes, or why there is none.
    """

    name: str
    title: str
    is_exact: bool
    gives_up: str
    tokens_per_second: float | None
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WhichReport(Report):
    """What one machine alone does (None: it does not fit), and what `machines` of them do together, by shape."""

    model: str
    machine: str
    machines: int
    link_bytes_per_second: float
    alone_tokens_per_second: float | None
    shapes: tuple[ClusterShape, ...]

    @property
    def take(self) -> str:
        """The name of the shape to take: the fastest with the bits of one machine, if it gains enough; else the fastest at
        all; "alone" where none gains.
        """
        least = _WORTH_IT * (self.alone_tokens_per_second or 0.0)
        there = [each for each in self.shapes if each.tokens_per_second is not None and each.tokens_per_second > least]
        exact = [each for each in there if each.is_exact]
        best = max(exact or there, key=lambda each: each.tokens_per_second or 0.0, default=None)
        return best.name if best else "alone"

    @property
    def advice(self) -> str:
        """Which shape to take, in words."""
        by_name = {each.name: each for each in self.shapes}
        if self.take == "alone":
            return "one machine alone: over this link none of them is enough faster"
        taken = by_name[self.take]
        words = f"{taken.title}: {self._times(taken)}; gives up {taken.gives_up}"
        faster = [
            each for each in self.shapes if (each.tokens_per_second or 0.0) > _WORTH_IT * (taken.tokens_per_second or 0.0)
        ]
        return words + "".join(f". Faster is {each.title}, {self._times(each)}: gives up {each.gives_up}" for each in faster)

    def _times(self, shape: ClusterShape) -> str:
        if not self.alone_tokens_per_second:
            return f"{plain_figure(shape.tokens_per_second or 0.0, 3)} tokens/s where one machine alone has no room"
        return f"{plain_figure((shape.tokens_per_second or 0.0) / self.alone_tokens_per_second, 3)} times one machine"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        shapes = {each.name: {"tokens_per_second": each.tokens_per_second, "words": each.words} for each in self.shapes}
        asked = figures(self, "model", "machine", "machines", "link_bytes_per_second", "alone_tokens_per_second")
        return asked | {"shapes": shapes} | figures(self, "take", "advice")

    def lines(self) -> Iterator[str]:
        """Yield the lines that people read."""
        yield line("model", self.model)
        rate = f"{plain_figure(self.link_bytes_per_second * 8 / 1e6)} Mbit/s each way"
        yield line("machines", f"{self.machines} x {self.machine}, links of {rate}; other numbers: --workers, --stages")
        alone = self.alone_tokens_per_second
        yield line("alone", "does not fit" if alone is None else f"{plain_figure(alone, 4)} tokens/s on one of them")
        for each in self.shapes:
            rate = "no" if each.tokens_per_second is None else f"{plain_figure(each.tokens_per_second, 4)} tokens/s"
            yield line(each.name, f"{rate}: {each.words}")
        yield line("take", self.advice)


def plan_which(model: str, options: PlanOptions, *, here: bool) -> WhichReport:
    """Plan the training of `model` in each shape over the link of `options`.

    Raises:
        ConfigError: there is no machine. Else as `plan_model`.
    """
    link = float(options.link or 0.0)
    options = replace(options, machine=machine_of(options, "link"))
    one = plan_model(model, replace(options, link=None), here=here, variants_seconds=0.0)
    tokens = one.forecast.tokens_per_second if one.forecast else None

    def node() -> tuple[float, str]:
        found = plan_cluster(model, replace(options, workers=MACHINES), here=here)
        if found.forecast is None:
            raise ConfigError(found.reason)
        seconds, received = format_seconds(found.forecast.step_seconds), format_bytes(found.forecast.worker_bytes.received)
        return found.forecast.tokens_per_second, f"a step in {seconds}; each worker receives {received}"

    def stages() -> tuple[float, str]:
        found = plan_stages(model, replace(options, stages=MACHINES), here=here)
        if not found.fits:
            raise ConfigError(found.reason)
        seconds, crossing = format_seconds(found.step_seconds), format_bytes(found.cut_bytes)
        words = f"a step in {seconds}; {crossing} cross a cut; the slowest stage is busy {found.utilisation:.0%} of the time"
        return found.tokens_per_second, words

    def local_steps() -> tuple[float, str]:
        if tokens is None:
            raise ConfigError(one.reason)
        found = LocalReport.of(one, replace(options, local_steps=LOCAL_STEPS))
        words = (
            f"rounds of {LOCAL_STEPS} steps; {format_bytes(found.way_bytes)} up and down; each computes {found.busy_share:.0%} "
            f"of the time, nine tenths from {found.least_steps} steps on"
        )
        return MACHINES * tokens * found.busy_share, words

    no_loss, other = "nothing: the bits of one machine", "these bits, and in one place: each has a copy of all states"
    return WhichReport(
        model=one.model,
        machine=one.machine,
        machines=MACHINES,
        link_bytes_per_second=link,
        alone_tokens_per_second=tokens,
        shapes=(
            _shape("node", "a node", no_loss, node),
            _shape("stages", "stages", no_loss, stages),
            _shape("local", "local steps", other, local_steps, is_exact=False),
        ),
    )


def _shape(
    name: str, title: str, gives_up: str, plan: Callable[[], tuple[float, str]], *, is_exact: bool = True
) -> ClusterShape:
    tokens: float | None = None
    try:
        tokens, words = plan()
    except (InputError, PlanInfeasible) as refusal:
        words = str(refusal)
    return ClusterShape(name=name, title=title, is_exact=is_exact, gives_up=gives_up, tokens_per_second=tokens, words=words)
