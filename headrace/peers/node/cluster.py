"""What workers and a node will do together: seconds of a step, bytes over each link, what limits, and what to buy next.

The simulated programs are those that both sides run (`schedules.train` with far units, `schedules.serve`). They run at the
rates of their profiles, with links by one rule (`links`). Each of K nodes holds 1/K of every unit. To a step they are one node
with K times the drives, cores and memory, whose links each carry 1/K.

Invariant: results follow from plans and cluster alone. No clock, no files, no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from headrace.peers.node.joint import JointTimeline, RankedOp, simulate_joint
from headrace.peers.node.links import Link, Network, Pattern
from headrace.peers.node.programs import build_serving, turns_of
from headrace.plan.clock.bound import least_seconds
from headrace.plan.clock.rates import Rates
from headrace.plan.clock.simulate import union_seconds
from headrace.plan.forecast.forecast import SEARCH_OPERATIONS, programs_of, simulated_plan, under
from headrace.plan.schedules.ledger import Snapshot
from headrace.plan.value.plan import Plan
from headrace.terms.forms import SSD
from headrace.terms.lanes import Lane
from headrace.terms.layout import UNIT_ALIGNMENT
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.program import Program, Verb
from headrace.terms.sizes import round_up

_Span = tuple[float, float, float]  # start, stop, bytes per second

WORKER, NODE = 0, 1  # ranks: one worker stands for all
# Operations of a step, of worker and node together, above which its work is cut more coarsely.
_MOST_OPERATIONS = 5000
# Operations of a chunk at the node. With fewer chunks than these, reading, updating and writing a unit would no longer overlap.
_PER_CHUNK, _LEAST_CHUNKS, _MOST_CHUNKS = 4, 4, 12
# At most so many programs are built until both repeat.
_MOST_PROGRAMS = 12
_TRANSFERS = (Lane.NIC_DOWN, Lane.NIC_UP)


class Thing(StrEnum):
    """What may limit workers and a node."""

    COMPUTE = "the workers' compute"
    DRIVES = "the node's drives"
    CORES = "the node's cores"
    LINKS = "the links"
    COPIES = "the workers' host-device links"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal workers, equal nodes, and the links between them. Ceilings are those of one worker and of one node."""

    worker: Ceilings
    node: Ceilings
    network: Network

    @classmethod
    def of(
        cls,
        worker: Ceilings,
        node: Ceilings,
        *,
        workers: int,
        link_bytes_per_second: float,
        nodes: int = 1,
        pattern: Pattern = Pattern.EXCHANGE,
        widening: float = 1.0,
    ) -> "Cluster":
        """Return a cluster whose links are all alike, with so many bytes per second each way; `widening` as links have it."""
        link = Link.duplex(link_bytes_per_second)
        network = Network(workers=workers, worker_link=link, node_link=link, nodes=nodes, pattern=pattern, widening=widening)
        worker = replace(worker, network_bytes_per_second=link_bytes_per_second)
        return cls(worker=worker, node=replace(node, network_bytes_per_second=link_bytes_per_second), network=network)

    @property
    def all_nodes(self) -> Ceilings:
        """The nodes as one machine."""
        return _times(self.node, self.network.nodes)

    def with_drives(self, factor: int) -> "Cluster":
        """Return the cluster with `factor` times as many drives in each node."""
        return replace(self, node=replace(self.node, drives=self.node.drives * factor))

    def with_nodes(self, factor: int) -> "Cluster":
        """Return the cluster with `factor` times as many nodes."""
        return replace(self, network=replace(self.network, nodes=self.network.nodes * factor))

    def with_links(self, factor: float) -> "Cluster":
        """Return the cluster with links `factor` times as fast."""
        network = self.network
        faster = replace(network, worker_link=network.worker_link.times(factor), node_link=network.node_link.times(factor))
        rates = [replace(each, network_bytes_per_second=each.network_bytes_per_second * factor) for each in self._machines]
        return replace(self, worker=rates[0], node=rates[1], network=faster)

    def with_cores(self, factor: int) -> "Cluster":
        """Return the cluster with `factor` times the cores and memory bandwidth in each node."""
        return replace(self, node=replace(_times(self.node, factor), drives=self.node.drives))

    @property
    def _machines(self) -> tuple[Ceilings, Ceilings]:
        return self.worker, self.node


def _times(node: Ceilings, factor: int) -> Ceilings:
    return replace(
        node,
        drives=node.drives * factor,
        cores=node.cores * factor,
        host_memory_bytes=node.host_memory_bytes * factor,
        host_memory_bytes_per_second=node.host_memory_bytes_per_second * factor,
        update_bytes_per_second=node.update_bytes_per_second * factor,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of a step: its seconds, and for each thing the share of them for which it is busy."""

    seconds: float
    shares: dict[Thing, float]

    @property
    def limit(self) -> Thing:
        """The thing that is busy for the largest share."""
        return max(self.shares, key=self.shares.__getitem__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Bytes of a step over one link, by direction."""

    received: int
    sent: int


@dataclass(frozen=True, kw_only=True)
class ClusterForecast:
    """A step of all workers and the node in the steady state.

    `forward` runs from the first weights that are sent to the last loss, `backward` from there to the next step, including the
    node's last update. `work` are by rank the seconds that each lane of worker and node takes alone.
    """

    step_seconds: float
    tokens_per_step: int
    workers: int
    forward: Phase
    backward: Phase
    worker_bytes: Copies
    node_bytes: Copies  # of each node
    ssd_bytes_read_per_step: int  # of all nodes
    ssd_bytes_written_per_step: int
    settled: bool
    cluster: Cluster = field(repr=False)
    timeline: JointTimeline = field(repr=False)
    rates: tuple[Rates, ...] = field(repr=False)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all workers together."""
        return self.tokens_per_step / self.step_seconds

    @property
    def tokens_per_second_per_worker(self) -> float:
        """Tokens per second of one worker."""
        return self.tokens_per_second / self.workers

    @property
    def shares(self) -> dict[Thing, float]:
        """The share of the step for which each thing is busy."""
        phases = (self.forward, self.backward)
        return {
            thing: sum(phase.shares[thing] * phase.seconds for phase in phases) / self.step_seconds
            for thing in self.forward.shares
        }

    @cached_property
    def lower_bound_seconds(self) -> float:
        """Seconds below which no machines with these ceilings can do the step's work, however well it overlaps."""
        bounds = []
        for rank, rates in enumerate(self.rates):
            work = {lane: use.alone_seconds for (of, lane), use in self.timeline.uses.items() if of == rank}
            bounds.append(least_seconds({lane: work.get(lane, 0.0) for lane in Lane if lane not in _TRANSFERS}, rates.speeds))
        return max(*bounds, *(self.timeline.uses[WORKER, lane].alone_seconds for lane in _TRANSFERS))


def forecast_cluster(
    worker: Plan, node: Plan, cluster: Cluster, *, tokens_per_step: int, most_operations: int = _MOST_OPERATIONS
) -> ClusterForecast:
    """Simulate consecutive steps of workers under the plan `worker`, all of whose units are far, and of a node under `node`.

    `tokens_per_step` counts the tokens of all workers.

    Raises:
        ConfigError: the worker's profile has no matrix rate for the plan's compute dtype.
    """
    coarse = simulated_plan(worker, cluster.worker, most_operations // 2)
    rates = (
        Rates(under(coarse, cluster.worker), coarse.compute_dtype, None, coarse.updates.threads),
        Rates(under(node, cluster.all_nodes), _any_dtype(cluster.node), None, None),
    )
    steps = _steps(coarse, coarse_node(node, coarse, most_operations))
    timeline = simulate_joint(steps, rates, cluster.network, transfer_seconds=cluster.worker.transfer_seconds)
    forward, backward = _phases(timeline, cluster.network)
    crossings = {lane: cluster.network.crossing(lane) for lane in _TRANSFERS}
    moved = {lane: timeline.uses[WORKER, lane].bytes for lane in _TRANSFERS}

    def copies(end: str) -> Copies:
        inward, outward = (
            round(sum(moved[lane] * getattr(crossings[lane], f"{end}_{way}") for lane in _TRANSFERS)) for way in ("in", "out")
        )
        return Copies(received=inward, sent=outward)

    return ClusterForecast(
        step_seconds=timeline.step_seconds,
        tokens_per_step=tokens_per_step,
        workers=cluster.network.workers,
        forward=forward,
        backward=backward,
        worker_bytes=copies("worker"),
        node_bytes=copies("node"),
        ssd_bytes_read_per_step=timeline.uses[NODE, Lane.SSD_READ].bytes,
        ssd_bytes_written_per_step=timeline.uses[NODE, Lane.SSD_WRITE].bytes,
        settled=timeline.settled,
        cluster=cluster,
        timeline=timeline,
        rates=rates,
    )


def _any_dtype(node: Ceilings) -> str:
    """Return any dtype for which the node has a figure: the node multiplies nothing."""
    return next(iter(node.flops_per_second))


def coarse_node(node: Plan, worker: Plan, most_operations: int = 2 * SEARCH_OPERATIONS) -> Plan:
    """Return the node's plan with few chunks for each unit of `worker`, whose plan may have been cut more coarsely."""
    units = tuple(replace(unit, home=SSD, is_far=False, cuts=()) for unit in worker.units)
    share = len(units) / len(node.units)
    per_unit = most_operations // 2 // len(units) // _PER_CHUNK
    largest = max(unit.num_elements for unit in units)
    pieces = min(_MOST_CHUNKS, max(_LEAST_CHUNKS, per_unit))
    updates = node.updates
    chunk_elements = max(updates.chunk_elements, round_up(-(-largest // pieces), UNIT_ALIGNMENT))
    return replace(
        node,
        units=units,
        num_blocks=worker.num_blocks,
        tied=worker.tied,
        host_slots=max(2, min(len(units), round(node.host_slots * share))),
        updates=replace(
            updates,
            chunk_elements=chunk_elements,
            # No more of the larger buffers than are needed to read, update and write at once.
            state_slots=updates.state_slots if chunk_elements == updates.chunk_elements else min(updates.state_slots, 3),
            late_units=tuple(range(len(units))) if updates.late_units else (),
            resident_states=tuple(range(round(len(updates.resident_states) * share))),
        ),
    )


def _steps(worker: Plan, node: Plan) -> list[tuple[Program, Program]]:
    """Return consecutive steps of both, until the worker's and the node's programs repeat."""
    steps: list[tuple[Program, Program]] = []
    before = Snapshot()
    # A copy on its way up counts as it comes to the node; between workers, and on a worker's host-device link, it is wider.
    narrower = worker.gradient_bytes_per_element // node.gradient_bytes_per_element
    programs = [_with_pushes(program, narrower) for program in programs_of(worker, durable=True)]
    known: dict[tuple[int, Snapshot], tuple[Program, Snapshot]] = {}
    for number in range(_MOST_PROGRAMS):
        program = programs[min(number, len(programs) - 1)]
        key = id(program), before
        if key not in known:
            known[key] = build_serving(node, turns_of(program), before)
        serving, after = known[key]
        steps.append((program, serving))
        if after == before and number >= len(programs) - 1:
            break
        before = after
    return [*steps, steps[-1], steps[-1]]


def _with_pushes(program: Program, narrower: int) -> Program:
    """Return the program with so much fewer bytes in each push."""
    ops = (replace(op, bytes=op.bytes // narrower) if op.verb is Verb.PUSH else op for op in program.ops)
    return program if narrower == 1 else Program(tuple(ops))


def _phases(timeline: JointTimeline, network: Network) -> tuple[Phase, Phase]:
    """Return forward and backward of the measured step."""
    worker = timeline.of_rank(WORKER)
    begin = min(timed.start_seconds for timed in worker if timed.op.lane is Lane.NIC_DOWN)
    turn = max(timed.stop_seconds for timed in worker if timed.op.verb is Verb.EPILOGUE)
    end = begin + timeline.step_seconds
    spans: dict[tuple[int, Lane], list[_Span]] = {}
    for timed in timeline.ops:
        seat = timed.op.rank if isinstance(timed.op, RankedOp) else 0, timed.op.lane
        seconds = timed.stop_seconds - timed.start_seconds
        rate = timed.op.bytes / seconds if seconds > 0 else 0.0
        for start, stop in _folded(timed.start_seconds, timed.stop_seconds, begin, end):
            spans.setdefault(seat, []).append((start, stop, rate))
    return _phase(network, spans, begin, turn), _phase(network, spans, turn, end)


def _phase(network: Network, spans: dict[tuple[int, Lane], list[_Span]], start: float, stop: float) -> Phase:
    seconds = stop - start
    shares = {}
    for thing, seats in _SEATS.items():
        parts = [(max(first, start), min(last, stop)) for seat in seats for first, last, _ in spans.get(seat, [])]
        shares[thing] = union_seconds(parts) / seconds if seconds > 0 else 0.0
    # A link that another one slows is not full all the time that something crosses it, so its bytes are counted.
    moved = {
        lane: sum(rate * max(0.0, min(last, stop) - max(first, start)) for first, last, rate in spans.get((WORKER, lane), []))
        for lane in _TRANSFERS
    }
    shares[Thing.LINKS] = network.busy_seconds(moved) / seconds if seconds > 0 else 0.0
    return Phase(seconds=seconds, shares=shares)


_SEATS = {
    Thing.COMPUTE: ((WORKER, Lane.COMPUTE), (WORKER, Lane.MAKE)),
    Thing.DRIVES: ((NODE, Lane.SSD_READ), (NODE, Lane.SSD_WRITE)),
    Thing.CORES: ((NODE, Lane.UPDATE),),
    Thing.COPIES: ((WORKER, Lane.HOST_TO_DEVICE), (WORKER, Lane.DEVICE_TO_HOST)),
}


def _folded(start: float, stop: float, begin: float, end: float) -> Iterator[tuple[float, float]]:
    """Yield the parts of a span within one step of the steady state: what runs beyond its end also ran into its beginning."""
    period = end - begin
    shift = (start - begin) // period * period
    start, stop = start - shift, stop - shift
    yield start, min(stop, end)
    if stop > end:
        yield begin, min(end, stop - period)
