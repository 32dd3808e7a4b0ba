"""What links between machines carry: one rule says who uses which, and how fast a copy of the weights or gradients goes.

A *copy* is what all workers get of a unit (its weights, DOWN) or give of it (its gradient, UP). On its way it crosses links of
the node and of workers. Some carry more or fewer bytes than it has. A pattern of exchange decides only these ratios
(`_crossings`). Copies that are under way at once share links by progressive filling. All of them get faster equally until a
link is full; copies that cross it keep their rate, the others continue. This is max-min fairness (Bertsekas and Gallager, Data
Networks, 6.5.2).

Patterns, for W workers and K nodes that hold 1/K of each unit:

* *exchange* (Headrace): the node sends worker j its part of 1/W, which worker j sends to the others. Worker j sums part j of
  all gradients and sends it to the node. A node sends and receives one copy, however many workers there are. While weights and
  gradients are under way at once, each worker sends and receives 2 - 1/W copies. It is 3 - 2/W if gradients between workers are
  float32, and half as large on their way to the node (`widening` 2).
* *switch* (LuWu): a switch repeats what the node sends, and sums what workers send.
* *star*: the node sends to each worker and receives from each.

Invariant: results follow from the values alone; a faster link makes no copy slower that is alone, and never fewer bytes move in
all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from headrace.terms.lanes import Lane


class Pattern(StrEnum):
    """How copies travel between a node and its workers."""

    EXCHANGE = "exchange"
    SWITCH = "switch"
    STAR = "star"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link: bytes per second to a machine, from it, and both together, where that is less than their sum (half duplex).

    `machines` is the number of machines that share it, such as several behind one uplink.
    """

    in_bytes_per_second: float
    out_bytes_per_second: float
    both_bytes_per_second: float | None = None
    machines: int = 1

    @classmethod
    def duplex(cls, bytes_per_second: float) -> "Link":
        """Return a link with the same rate each way."""
        return cls(in_bytes_per_second=bytes_per_second, out_bytes_per_second=bytes_per_second)

    def times(self, factor: float) -> "Link":
        """Return a link with `factor` times the rates."""
        both = self.both_bytes_per_second
        return Link(
            in_bytes_per_second=self.in_bytes_per_second * factor,
            out_bytes_per_second=self.out_bytes_per_second * factor,
            both_bytes_per_second=None if both is None else both * factor,
            machines=self.machines,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """How many bytes cross the link of a worker and of a node, into it and out of it, per byte of a copy."""

    worker_in: float
    worker_out: float
    node_in: float
    node_out: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The links of equal `workers` and of equal `nodes`, and the pattern in which copies cross them."""

    workers: int
    worker_link: Link
    node_link: Link
    nodes: int = 1
    pattern: Pattern = Pattern.EXCHANGE
    widening: float = 1.0  # bytes of a gradient between workers, over those on its way to the node

    def crossing(self, lane: Lane) -> Crossing:
        """Return what one copy crosses on its way down (`NIC_DOWN`) or up (`NIC_UP`)."""
        workers, nodes = self.workers, self.nodes
        others = (workers - 1) / workers if self.pattern is Pattern.EXCHANGE else 0.0
        at_node = (workers if self.pattern is Pattern.STAR else 1) / nodes
        if lane is Lane.NIC_DOWN:
            return Crossing(worker_in=1.0, worker_out=others, node_in=0.0, node_out=at_node)
        exchanged = others * self.widening
        return Crossing(worker_in=exchanged, worker_out=exchanged + 1.0 - others, node_in=at_node, node_out=0.0)

    def alone_bytes_per_second(self, lane: Lane) -> float:
        """Return the bytes per second of a copy with nothing else under way."""
        return self.bytes_per_second((lane,))[lane]

    def bytes_per_second(self, lanes: Sequence[Lane]) -> Mapping[Lane, float]:
        """Return the bytes per second of copies in each of `lanes` (`NIC_DOWN`, `NIC_UP`) while all of these are under way."""
        crossings = {lane: self.crossing(lane) for lane in lanes}
        limits = [*_limits(self.worker_link, crossings, "worker"), *_limits(self.node_link, crossings, "node")]
        rates = dict.fromkeys(lanes, 0.0)
        growing = set(lanes)
        while growing:
            rooms = [
                (room, uses)
                for most, uses in limits
                if (more := sum(uses[lane] for lane in growing)) > 0
                for room in [(most - sum(uses[lane] * rates[lane] for lane in lanes)) / more]
            ]
            step = min(room for room, _ in rooms)
            rates = {lane: rate + (step if lane in growing else 0.0) for lane, rate in rates.items()}
            full = [uses for room, uses in rooms if room <= step * (1 + 1e-12)]
            growing -= {lane for lane in growing if any(uses[lane] > 0 for uses in full)}
        return rates

    def busy_seconds(self, copied: Mapping[Lane, float]) -> float:
        """Return the seconds for which the busiest link is full, for so many bytes copied in each lane."""
        crossings = {lane: self.crossing(lane) for lane in copied}
        limits = [*_limits(self.worker_link, crossings, "worker"), *_limits(self.node_link, crossings, "node")]
        return max(sum(uses[lane] * copied[lane] for lane in copied) / most for most, uses in limits)


def _limits(link: Link, crossings: Mapping[Lane, Crossing], end: str) -> list[tuple[float, dict[Lane, float]]]:
    """Return the limits of a link: bytes per second, and how much of them a copy of each lane uses per byte."""
    inward = {lane: link.machines * getattr(crossing, f"{end}_in") for lane, crossing in crossings.items()}
    outward = {lane: link.machines * getattr(crossing, f"{end}_out") for lane, crossing in crossings.items()}
    limits = [(link.in_bytes_per_second, inward), (link.out_bytes_per_second, outward)]
    if link.both_bytes_per_second is not None:
        limits.append((link.both_bytes_per_second, {lane: inward[lane] + outward[lane] for lane in crossings}))
    return limits
