"""What `headrace plan --workers` answers, as a value and as text.

Invariant: the report says that it fits only if there is a plan of a worker and of the node. Every printed number is one of the
report's.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from headrace.ask.plan_report import TrainingReport
from headrace.peers.node.cluster import ClusterForecast, Phase
from headrace.plan.value.plan import Plan
from headrace.terms.plain_figures import plain_figure
from headrace.terms.sizes import format_bytes, format_seconds
from headrace.terms.tables import Memory, figures, line, memory_table

_COLUMN = 14
# A purchase is only worth a line if it gives at least so many times the tokens per second.
_WORTH_IT = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """Something to buy: `drives`, `nodes`, `links`, `cores`, or `tokens`, which are free; `gain` is the factor in tokens/s."""

    name: str
    change: str
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport(TrainingReport):
    """Whether workers and a node can train a model, how fast, what limits them, and what would be better.

    `purchases` are sorted, those that gain most come first.
    """

    workers: int
    nodes: int
    node_ssds: int
    worker_machine: str
    node_machine: str
    link_bytes_per_second: float
    worker_plan: Plan | None = None
    node_plan: Plan | None = None
    forecast: ClusterForecast | None = None
    purchases: tuple[Purchase, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether there is a plan within the budgets."""
        return self.forecast is not None

    @property
    def buy_next(self) -> str:
        """The name of the purchase that gains most; "none" where compute leaves hardly anything to gain."""
        worthy = [each for each in self.purchases if each.gain >= _WORTH_IT]
        return worthy[0].name if worthy else "none"

    def to_json(self) -> dict[str, Any]:
        """Return one object of plain JSON values; unknown figures are null."""
        found, worker, node = self.forecast, self.worker_plan, self.node_plan
        machines = ("worker_machine", "node_machine", "link_bytes_per_second")
        values = self.asked_json("workers", "nodes", "node_ssds", *machines)
        values |= figures(found, "step_seconds", "lower_bound_seconds", "tokens_per_second", "tokens_per_second_per_worker")
        values |= {
            "forward": _phase_json(found.forward) if found else None,
            "backward": _phase_json(found.backward) if found else None,
            "bottleneck": limit_words(found) if found else None,
            "utilisation": {str(thing): share for thing, share in found.shares.items()} if found else None,
        }
        for peer in ("worker", "node"):
            moved = figures(getattr(found, f"{peer}_bytes", None), "received", "sent")
            values |= {f"{peer}_bytes_{way}_per_step": size for way, size in moved.items()}
        return values | {
            **figures(found, "ssd_bytes_read_per_step", "ssd_bytes_written_per_step"),
            "purchases": list(map(asdict, self.purchases)),
            "buy_next": self.buy_next if found else None,
            "peak_bytes_by_purpose": {
                "worker": worker.results.peak_bytes if worker else None,
                "node": node.results.peak_bytes if node else None,
            },
            "worker_plan": worker.to_json() if worker else None,
            "node_plan": node.to_json() if node else None,
            **self.wear_json(),
        }


def _phase_json(phase: Phase) -> dict[str, Any]:
    shares = {str(thing): share for thing, share in phase.shares.items()}
    return {"seconds": phase.seconds, "limit": str(phase.limit), "shares": shares}


def limit_words(found: ClusterForecast) -> str:
    """Return words about what limits a step, by phase."""
    phases = (("forward", found.forward), ("backward", found.backward))
    return "; ".join(
        f"{name} {format_seconds(phase.seconds)}, limited by {phase.limit} (busy {phase.shares[phase.limit]:.0%} of it)"
        for name, phase in phases
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticReport:
    """A run that begins with some workers and takes in more: with the `most`, and with the `least` that it goes on with."""

    most: ClusterReport
    least: ClusterReport

    def to_json(self) -> dict[str, Any]:
        """Return the JSON values of the most workers, and below `least` those of the least."""
        return self.most.to_json() | {"least": self.least.to_json()}

    def explain(self) -> str:
        """Return the report of the most workers as text, and a line on the least."""
        found = self.least.forecast
        with_least = f"with {self.least.workers} worker{'s' if self.least.workers > 1 else ''}"
        if found is None:
            words = f"{with_least}: no: {self.least.reason}"
        else:
            seconds, tokens = format_seconds(found.step_seconds), plain_figure(found.tokens_per_second, 4)
            words = f"{with_least}: {seconds} per step, {tokens} tokens/s; {limit_words(found)}"
        return "\n".join((explain_cluster(self.most), line("at least", words)))


def explain_cluster(report: ClusterReport) -> str:
    """Return `report` as lines of text."""
    return "\n".join(_lines(report))


def _lines(report: ClusterReport) -> Iterator[str]:
    size = f"{plain_figure(report.parameters / 1e9)} billion parameters"
    yield line("model", f"{report.model}, {size}, {report.compute_dtype} compute, {report.rule}")
    link = f"{plain_figure(report.link_bytes_per_second * 8 / 1e9)} Gbit/s each way"
    yield line("workers", f"{report.workers} x {report.worker_machine}, a link of {link}")
    nodes = f"{report.nodes} x " if report.nodes > 1 else ""
    yield line("node", f"{nodes}{report.node_machine} with {report.node_ssds} SSDs, a link of {link}")
    yield line("step", f"{report.tokens_per_step} tokens of all workers, sequences of {report.sequence_length}")
    found, worker, node = report.forecast, report.worker_plan, report.node_plan
    if found is None or worker is None or node is None:
        yield line("fits", f"no: {report.reason}")
        return
    yield line("fits", "yes")
    yield ""
    yield from _tiers(worker, node)
    yield ""
    at_best = format_seconds(found.lower_bound_seconds)
    yield line(
        "time",
        f"{format_seconds(found.step_seconds)} per step, {plain_figure(found.tokens_per_second, 4)} tokens/s of all workers, "
        f"{plain_figure(found.tokens_per_second_per_worker, 4)} of each (at best {at_best}, if nothing waited)",
    )
    for at, words in enumerate(limit_words(found).split("; ")):
        yield line("" if at else "limit", words)
    yield from _purchases(report)
    one, other = found.worker_bytes, found.node_bytes
    yield line(
        "network",
        f"each worker receives {format_bytes(one.received)} and sends {format_bytes(one.sent)} per step, "
        f"each node receives {format_bytes(other.received)} and sends {format_bytes(other.sent)}",
    )
    read, written = found.ssd_bytes_read_per_step, found.ssd_bytes_written_per_step
    yield line("ssd", f"{format_bytes(read)} read and {format_bytes(written)} written per step, at the node")
    if report.endurance is not None:
        yield line("run", report.endurance.explain())


def _purchases(report: ClusterReport) -> Iterator[str]:
    names = {"none": "nothing of this: the workers' compute sets the pace; more workers give more tokens a second"}
    yield line("buy next", names.get(report.buy_next, report.buy_next))
    for each in report.purchases:
        yield line("", f"{each.change}: {plain_figure(each.gain, 3)} times the tokens a second")


def _tiers(worker: Plan, node: Plan) -> Iterator[str]:
    """Yield one column for each tier of a worker and of the node, with what it holds."""
    columns = [
        Memory(f"{name} {tier}", purposes, plan.results.allowed_bytes.get(tier))
        for name, plan in (("worker", worker), ("node", node))
        for tier, purposes in plan.results.peak_bytes.items()
        if any(purposes.values())
    ]
    return memory_table(columns, free=False, width=_COLUMN)
