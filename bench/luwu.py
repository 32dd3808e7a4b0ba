"""LuWu's own policy as programs of workers and a node, and what was published about it: a check of the joint simulator.

Source: arXiv 2409.00918 (LuWu; its second version calls itself DisDP): 8 servers with an A100 40 GB each, 100 Gbit/s, and one
node of 12 SSDs; bfloat16, sequence length 1024, activation checkpointing. What the programs do is what that paper says:

* forward: the node reads a layer's 16-bit weights, a switch repeats them to all workers; backward: the same, the switch sums
  the workers' gradients on their way, the node reads master and moments, updates, and writes these and the weights;
* bytes go between the network and the GPU's memory directly, so there is no host-device lane at a worker;
* the node sends ahead of demand, as far as workers have buffers (`_CREDITS`).

Four constants stand for that system, one value of each for every line, none fitted but the last: the link's 12.5 GB/s, the
SSDs' 26 GB/s in each direction and 14 bytes for a parameter are the paper's; compute is the profile `a100-40g`, whose share for
what is no matrix product was chosen on the 1.3B line.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.peers.node.cluster import NODE, WORKER, Thing
from headrace.peers.node.joint import JointTimeline, simulate_joint
from headrace.peers.node.links import Link, Network, Pattern
from headrace.plan.clock.machine_profiles import load_profile
from headrace.plan.clock.rates import Rates
from headrace.terms.lanes import Lane
from headrace.terms.program import Op, Program, Verb

LINK_BYTES_PER_SECOND = 12.5e9
DRIVE_BYTES_PER_SECOND = 26e9  # in each direction, at equal parts of both
WEIGHT_BYTES, STATE_BYTES = 2, 12
_LENGTH = 1024
_VOCABULARY = 50257
# Layers of weights and of gradients that a worker has room for, and the node on their way.
_CREDITS = 3
# Layers that the node has read before they are sent.
_AHEAD = 4
# Pieces in which a layer's states are read, updated and written.
_PIECES = 6
# A GPU's rated TFLOP/s, of which the paper gives shares, and operations of a parameter and token, recompute included.
_RATED, _COUNTED = 312e12, 8
TOLERANCE = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A GPT-3 model: `num_layers` layers of 12 h² parameters and an embedding, which is the head, too."""

    name: str
    num_layers: int
    hidden_size: int

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer."""
        return 12 * self.hidden_size**2

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding."""
        return _VOCABULARY * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Parameters of the model."""
        return self.num_layers * self.layer_parameters + self.embedding_parameters

    def layer_flops(self, tokens: int) -> float:
        """Return the operations of a layer's forward, attention included."""
        return (2.0 * self.layer_parameters + 4.0 * _LENGTH * self.hidden_size) * tokens


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="1.3B", num_layers=24, hidden_size=2048),
        Shape(name="13B", num_layers=40, hidden_size=5120),
        Shape(name="30B", num_layers=48, hidden_size=7168),
        Shape(name="66B", num_layers=64, hidden_size=9216),
        Shape(name="175B", num_layers=96, hidden_size=12288),
        Shape(name="276B", num_layers=112, hidden_size=14336),
        Shape(name="505B", num_layers=124, hidden_size=18432),
        Shape(name="1T", num_layers=172, hidden_size=22016),
    )
}


def _of_share(name: str, share: float) -> float:
    """Return tokens per second of a share of the rated operations."""
    return share * _RATED / (_COUNTED * SHAPES[name].num_parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A configuration, and what was published of it: tokens per second of each worker, None where no figure is given.

    `fitted`: a constant was chosen on it.
    """

    shape: Shape
    batch: int
    workers: int = 8
    published: float | None = None
    words: str = ""
    fitted: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a worker's step."""
        return self.batch * _LENGTH


POINTS = (
    Point(shape=SHAPES["1.3B"], batch=32, published=14100, words="14.1k tokens/s, flat above a batch of 16", fitted=True),
    Point(shape=SHAPES["13B"], batch=16),
    Point(shape=SHAPES["30B"], batch=16),
    Point(shape=SHAPES["66B"], batch=16),
    Point(shape=SHAPES["175B"], batch=16, published=134, words="134 tokens/s, the headline"),
    Point(shape=SHAPES["175B"], batch=16, workers=32, published=4386 / 32, words="4386 tokens/s of 32 workers, its simulation"),
    Point(shape=SHAPES["276B"], batch=16, published=_of_share("276B", 0.59), words="59 % of the rated TFLOP/s"),
    Point(shape=SHAPES["505B"], batch=16),
    Point(shape=SHAPES["1T"], batch=8),
)


def closed_form_seconds(num_parameters: float) -> tuple[float, float]:
    """Return the seconds of forward, which the link limits, and of backward, which the SSDs do: S/B and 14P/D."""
    forward = WEIGHT_BYTES * num_parameters / LINK_BYTES_PER_SECOND
    return forward, (WEIGHT_BYTES + STATE_BYTES) * num_parameters / DRIVE_BYTES_PER_SECOND


def simulate_luwu(point: Point) -> JointTimeline:
    """Return the steady state of LuWu's policy at a point, on the constants above."""
    worker, node = load_profile("a100-40g"), load_profile("luwu-node-12ssd")
    rates = [Rates(worker, "bfloat16", None, None), Rates(node, "bfloat16", None, None)]
    link = Link.duplex(LINK_BYTES_PER_SECOND)
    network = Network(workers=point.workers, worker_link=link, node_link=link, pattern=Pattern.SWITCH)
    programs = _worker_program(point), _node_program(point.shape)
    return simulate_joint([programs] * 3, rates, network, transfer_seconds=worker.transfer_seconds)


def limits(timeline: JointTimeline) -> str:
    """Return the busiest of what both sides have, with its share of the step."""
    seats = {
        Thing.COMPUTE: (WORKER, Lane.COMPUTE),
        Thing.DRIVES: (NODE, Lane.SSD_WRITE),
        Thing.CORES: (NODE, Lane.UPDATE),
        Thing.LINKS: (WORKER, Lane.NIC_DOWN),
    }
    shares = {thing: timeline.uses[seat].busy_seconds / timeline.step_seconds for thing, seat in seats.items()}
    thing = max(shares, key=shares.__getitem__)
    return f"{thing} {shares[thing]:.0%}"


PAGE = """
## LuWu: workers and a node

The programs of a worker and of the node follow LuWu's own policy (arXiv 2409.00918), on one virtual clock. A switch repeats
weights and sums gradients, 14 bytes a parameter lie on SSDs, updates run behind backward. Links of 12.5 GB/s and SSDs of 26
GB/s, each way, are the paper's. Compute is the profile `a100-40g`; its share of time outside matrix products was fitted to the
first line, and no other figure is fitted. Tokens per second are those of each worker. "Closed form" is forward S/B and backward
14P/D; S is 2 bytes for each of P parameters. For 175e9 of them that is 28.0 s + 94.2 s, 134 tokens/s. "-": the paper's text has
no figure.

{rows}
What Headrace's own plan makes of that rig is in [docs/node.md](node.md): no switch, 12 bytes a parameter, other buffers.
"""


def table() -> str:
    """Return all points as a Markdown table."""
    lines = [
        "| model | batch | workers | published tokens/s | closed form | simulated | simulated / published | within 10 % "
        "| what is busiest over the step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for point in POINTS:
        found = simulate_luwu(point)
        speed, closed = point.tokens / found.step_seconds, point.tokens / sum(closed_form_seconds(point.shape.num_parameters))
        known = point.published is not None
        ratio = speed / point.published if point.published is not None else 0.0
        hit = "yes" if abs(ratio - 1) <= TOLERANCE else "no"
        words = (f"{point.published:.0f}: {point.words}", f"{ratio:.3f}", hit) if known else ("-", "-", "-")
        lines.append(
            f"| {point.shape.name} | {point.batch} | {point.workers} | {words[0]} | {closed:.0f} | {speed:.0f} "
            f"| {words[1]} | {words[2]} | {limits(found)} |"
        )
    return "\n".join(lines) + "\n"


class _Emitter:
    """Collects operations; `used` and so on are for windows: something waits for what is so many uses before."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def emit(self, verb: Verb, lane: Lane, after: Sequence[int] = (), previous: Sequence[int] = (), **fields: Any) -> int:
        index = len(self.ops)
        self.ops.append(
            Op(index=index, verb=verb, lane=lane, after=tuple(sorted(after)), after_previous=tuple(previous), **fields)
        )
        return index


def _units(shape: Shape) -> list[int]:
    """Return parameters by unit: the embedding, then the layers."""
    return [shape.embedding_parameters, *([shape.layer_parameters] * shape.num_layers)]


def _order(shape: Shape) -> list[tuple[int, bool]]:
    """Return what is pulled, in order, and whether it is pushed after."""
    units = range(shape.num_layers + 1)
    return [*((unit, False) for unit in units), *((unit, True) for unit in reversed(units))]


def _worker_program(point: Point) -> Program:
    shape, tokens, out = point.shape, point.tokens, _Emitter()
    profile = load_profile("a100-40g")
    # What is no matrix product stands as the operations of so many seconds, a third of it in forward and recompute each.
    besides = profile.hidden_seconds * tokens * shape.hidden_size * profile.matrix_flops_per_second("bfloat16")
    head = 2.0 * shape.embedding_parameters * tokens
    used: list[int] = []
    pushed: list[int] = []
    for unit, is_back in _order(shape):
        num_bytes = WEIGHT_BYTES * _units(shape)[unit]
        pull = out.emit(
            Verb.PULL, Lane.NIC_DOWN, used[-_CREDITS:][:1] if len(used) >= _CREDITS else (), unit=unit, bytes=num_bytes
        )
        forward = 0.0 if unit == 0 else shape.layer_flops(tokens) + besides / 4
        flops = 3 * (forward + (head if unit == 0 else 0.0)) if is_back else forward
        room = pushed[-_CREDITS:][:1] if is_back and len(pushed) >= _CREDITS else []
        ref = out.emit(Verb.BACKWARD if is_back else Verb.FORWARD, Lane.COMPUTE, [pull, *room], unit=unit, flops=flops)
        used.append(ref)
        if is_back:
            pushed.append(out.emit(Verb.PUSH, Lane.NIC_UP, [ref], unit=unit, bytes=num_bytes))
    return Program(tuple(out.ops))


def _node_program(shape: Shape) -> Program:
    """Return the node's. Reading weights is a stage of its own: it goes ahead of what updates read. What is read for the next
    step's first layers waits for their weights to be written.
    """
    order, parameters = _order(shape), _units(shape)
    out, fetched, sent, updated = _Emitter(), list[int](), list[int](), list[int]()
    forward, written = list[int](), dict[int, int]()
    for place, (unit, is_back) in enumerate(order):
        for ahead, (other, other_is_back) in enumerate(order[len(fetched) : place + _CREDITS], start=len(fetched)):
            room = sent[ahead - _AHEAD : ahead - _AHEAD + 1] if ahead >= _AHEAD else []
            fetched.append(out.emit(Verb.FETCH, Lane.SSD_READ, room, unit=other, bytes=WEIGHT_BYTES * parameters[other]))
            if not other_is_back:
                forward.append(fetched[-1])
        size = WEIGHT_BYTES * parameters[unit]
        sent.append(out.emit(Verb.SEND, Lane.NIC_DOWN, [fetched[place]], unit=unit, bytes=size))
        if is_back:
            _update(out, unit, parameters[unit], updated)
            written[unit] = updated[-1]
    ops = [replace(op, after_previous=(written[op.unit],)) if op.index in forward else op for op in out.ops]
    return Program(tuple(ops))


def _update(out: _Emitter, unit: int, parameters: int, updated: list[int]) -> None:
    """Emit what becomes of a layer's gradient; `updated` are the writes until now."""
    room = updated[-_CREDITS * _PIECES :][:1] if len(updated) >= _CREDITS * _PIECES else []
    receive = out.emit(Verb.RECEIVE, Lane.NIC_UP, room, unit=unit, bytes=WEIGHT_BYTES * parameters)
    part = parameters // _PIECES
    for piece in range(_PIECES):
        common: dict[str, Any] = {"unit": unit, "chunk": piece}
        free = updated[-_PIECES:][:1] if len(updated) >= _PIECES else []
        read = out.emit(Verb.READ_STATES, Lane.SSD_READ, free, bytes=STATE_BYTES * part, **common)
        update = out.emit(Verb.UPDATE, Lane.UPDATE, [read, receive], bytes=28 * part, **common)
        updated.append(
            out.emit(Verb.WRITE_STATES, Lane.SSD_WRITE, [update], bytes=(STATE_BYTES + WEIGHT_BYTES) * part, **common)
        )
