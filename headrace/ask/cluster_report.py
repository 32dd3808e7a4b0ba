"""What `headrace plan --workers` answers, as a value and as text.

Invariant: the report says that it fits only if there is a plan of a worker and of the node. Every printed number is one of the
report's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.plan.cluster import ClusterForecast, Phase
from headrace.plan.endurance import Endurance
from headrace.plan.plan import Plan
from headrace.terms.plain_figures import plain_figure
from headrace.terms.sizes import format_bytes, format_seconds

_LABEL = 10
_ROW, _COLUMN = 20, 14
# A purchase is only worth a line if it gives at least so many times the tokens per second.
_WORTH_IT = 1.02
_GIVEN = (
    *("model", "parameters", "compute_dtype", "rule", "tokens_per_step", "sequence_length", "workers", "nodes", "node_ssds"),
    *("worker_machine", "node_machine", "link_bytes_per_second", "fits", "reason"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """Something to buy: `drives`, `nodes`, `links`, `cores`, or `tokens`, which are free; `gain` is the factor in tokens/s."""

    name: str
    change: str
    gain: float

    def to_json(self) -> dict[str, Any]:
        """Return the purchase as plain JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport:
    """Whether workers and a node can train a model, how fast, what limits them, and what would be better.

    `reason` says why it does not fit. `purchases` are sorted, those that gain most come first.
    """

    model: str
    parameters: int
    compute_dtype: str
    rule: str
    tokens_per_step: int
    sequence_length: int
    workers: int
    nodes: int
    node_ssds: int
    worker_machine: str
    node_machine: str
    link_bytes_per_second: float
    reason: str = ""
    worker_plan: Plan | None = None
    node_plan: Plan | None = None
    forecast: ClusterForecast | None = None
    endurance: Endurance | None = None
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
        found, worker, node, wear = self.forecast, self.worker_plan, self.node_plan, self.endurance
        values: dict[str, Any] = {name: getattr(self, name) for name in _GIVEN}
        values |= {
            "step_seconds": found.step_seconds if found else None,
            "lower_bound_seconds": found.lower_bound_seconds if found else None,
            "tokens_per_second": found.tokens_per_second if found else None,
            "tokens_per_second_per_worker": found.tokens_per_second_per_worker if found else None,
            "forward": _phase_json(found.forward) if found else None,
            "backward": _phase_json(found.backward) if found else None,
            "bottleneck": limit_words(found) if found else None,
            "utilisation": {str(thing): share for thing, share in found.shares.items()} if found else None,
            "worker_bytes_received_per_step": found.worker_bytes.received if found else None,
            "worker_bytes_sent_per_step": found.worker_bytes.sent if found else None,
            "node_bytes_received_per_step": found.node_bytes.received if found else None,
            "node_bytes_sent_per_step": found.node_bytes.sent if found else None,
            "ssd_bytes_read_per_step": found.ssd_bytes_read_per_step if found else None,
            "ssd_bytes_written_per_step": found.ssd_bytes_written_per_step if found else None,
            "purchases": [each.to_json() for each in self.purchases],
            "buy_next": self.buy_next if found else None,
            "peak_bytes_by_purpose": {
                "worker": worker.results.peak_bytes if worker else None,
                "node": node.results.peak_bytes if node else None,
            },
            "worker_plan": worker.to_json() if worker else None,
            "node_plan": node.to_json() if node else None,
        }
        if wear is not None:
            values |= {
                "num_steps": wear.num_steps,
                "run_hours": wear.run_hours,
                "written_terabytes": wear.written_terabytes,
                "share_of_endurance": wear.share_of_rating,
            }
        return values


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


def explain_cluster(report: ClusterReport) -> str:
    """Return `report` as lines of text."""
    return "\n".join(_lines(report))


def _lines(report: ClusterReport) -> Iterator[str]:
    size = f"{plain_figure(report.parameters / 1e9)} billion parameters"
    yield _line("model", f"{report.model}, {size}, {report.compute_dtype} compute, {report.rule}")
    link = f"{plain_figure(report.link_bytes_per_second * 8 / 1e9)} Gbit/s each way"
    yield _line("workers", f"{report.workers} x {report.worker_machine}, a link of {link}")
    nodes = f"{report.nodes} x " if report.nodes > 1 else ""
    yield _line("node", f"{nodes}{report.node_machine} with {report.node_ssds} SSDs, a link of {link}")
    yield _line("step", f"{report.tokens_per_step} tokens of all workers, sequences of {report.sequence_length}")
    found, worker, node = report.forecast, report.worker_plan, report.node_plan
    if found is None or worker is None or node is None:
        yield _line("fits", f"no: {report.reason}")
        return
    yield _line("fits", "yes")
    yield ""
    yield from _tiers(worker, node)
    yield ""
    at_best = format_seconds(found.lower_bound_seconds)
    yield _line(
        "time",
        f"{format_seconds(found.step_seconds)} per step, {plain_figure(found.tokens_per_second, 4)} tokens/s of all workers, "
        f"{plain_figure(found.tokens_per_second_per_worker, 4)} of each (at best {at_best}, if nothing waited)",
    )
    for at, words in enumerate(limit_words(found).split("; ")):
        yield _line("" if at else "limit", words)
    yield from _purchases(report)
    one, other = found.worker_bytes, found.node_bytes
    yield _line(
        "network",
        f"each worker receives {format_bytes(one.received)} and sends {format_bytes(one.sent)} per step, "
        f"each node receives {format_bytes(other.received)} and sends {format_bytes(other.sent)}",
    )
    read, written = found.ssd_bytes_read_per_step, found.ssd_bytes_written_per_step
    yield _line("ssd", f"{format_bytes(read)} read and {format_bytes(written)} written per step, at the node")
    if report.endurance is not None:
        yield _line("run", report.endurance.explain())


def _purchases(report: ClusterReport) -> Iterator[str]:
    names = {"none": "nothing of this: the workers' compute sets the pace; more workers give more tokens a second"}
    yield _line("buy next", names.get(report.buy_next, report.buy_next))
    for each in report.purchases:
        yield _line("", f"{each.change}: {plain_figure(each.gain, 3)} times the tokens a second")


def _tiers(worker: Plan, node: Plan) -> Iterator[str]:
    """Yield one column for each tier of a worker and of the node, with what it holds."""
    columns = [
        (f"{name} {tier}", rows, plan.results.allowed_bytes.get(tier))
        for name, plan in (("worker", worker), ("node", node))
        for tier, rows in plan.results.peak_bytes.items()
        if any(rows.values())
    ]
    yield "".ljust(_ROW) + "".join(name.rjust(_COLUMN) for name, _, _ in columns)
    for purpose in dict.fromkeys(purpose for _, rows, _ in columns for purpose in rows):
        sizes = [rows.get(purpose, 0) for _, rows, _ in columns]
        if any(sizes):
            yield purpose.ljust(_ROW) + "".join((format_bytes(size) if size else "-").rjust(_COLUMN) for size in sizes)
    yield "peak".ljust(_ROW) + "".join(format_bytes(sum(rows.values())).rjust(_COLUMN) for _, rows, _ in columns)
    allowed = [format_bytes(most) if most is not None else "unknown" for _, _, most in columns]
    yield "allowed".ljust(_ROW) + "".join(text.rjust(_COLUMN) for text in allowed)


def _line(label: str, text: str) -> str:
    return label.ljust(_LABEL) + text
