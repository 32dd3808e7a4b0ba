"""Fuyou's own policy as a program, and what was published about it: a check of the simulator against measurements.

Source: the raw data behind figures 5a and 7a of the Fuyou papers (arXiv 2403.06504; ICDE 2025 as *Ratel*): GPT-3 shapes on one
RTX 4090 with 12 SSDs, sequence length 1024. What the program does is what those papers and their released code do:

* the whole batch passes through a layer at once (no micro-batches), weights are fetched for forward and again for backward;
* the optimizer runs only behind backward: a sub-group's fp32 master and moments are read when the last of its layers has been
  handed to the GPU, updated on the CPU when all its gradients have arrived, and written while the next group is read; the
  next forward starts when the last write is complete;
* two tensors per layer are stashed in host memory; what recomputing the rest costs is within `F`.

Three constants stand for that system on that machine (`COMPUTE_FLOPS_PER_SECOND`, `READ_BYTES_PER_SECOND`,
`WRITE_BYTES_PER_SECOND`). There is one value of each for all models and batches; nothing is fitted per point. Everything else
(link, memory bus, update kernel, sizes of sub-groups) is the testbed's or the released code's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.plan.clock.simulate import simulate
from headrace.terms.lanes import Lane
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.machine.drives import Drive
from headrace.terms.program import Op, Program, Verb, Waiting

# What the released system gets out of the GPU, counting 6 operations per parameter and token: 96 % of the card's 165.2.
COMPUTE_FLOPS_PER_SECOND = 158e12
# What it gets out of 12 drives rated at 78 and 41 GB/s, over RAID-0 with one file per tensor, two threads, 1 MiB requests.
# Chosen on the 13B points among round figures (F 156..160, R 20..40, W 14.5..15.5): root mean square error 3.7 %, where the
# best is 3.6 % and the minimum is flat. F and W also fit the closed form max(2NT/F, 2N/R) + max(4NT/F, 14N/R, 14N/W).
READ_BYTES_PER_SECOND = 30e9
WRITE_BYTES_PER_SECOND = 15e9

# The smallest number of elements of a sub-group, as in the released code.
_GROUP_ELEMENTS = 700_000_000
# Its window of blocks of weights that are on their way or on the GPU.
_PREFETCH = 3
# Sub-groups whose states fit into its pinned buffers at once.
_STATE_BUFFERS = 2
_SEQUENCE_LENGTH = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A GPT-3 model: `num_layers` layers of 12 h² parameters and an embedding of `vocabulary` x h."""

    name: str
    num_layers: int
    hidden_size: int
    vocabulary: int = 50257

    @property
    def modules(self) -> tuple[int, ...]:
        """Parameters of what is fetched as one: the embedding, then attention and two halves of the MLP per layer."""
        return (self.vocabulary * self.hidden_size, *([4 * self.hidden_size**2] * (3 * self.num_layers)))

    @property
    def num_parameters(self) -> int:
        """Parameters of the model (without biases and norms)."""
        return sum(self.modules)


GPT3_13B = Shape(name="13B", num_layers=40, hidden_size=5120)
GPT3_175B = Shape(name="175B", num_layers=96, hidden_size=12288)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A published measurement; `teraflops` counts 6 operations per parameter and token. `fitted`: the constants saw it."""

    shape: Shape
    batch: int
    teraflops: float
    fitted: bool

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * _SEQUENCE_LENGTH

    @property
    def seconds(self) -> float:
        """Published seconds per step."""
        return 6 * self.shape.num_parameters * self.tokens / (self.teraflops * 1e12)

    def teraflops_at(self, seconds: float) -> float:
        """Return the rate that a step of `seconds` is, by the same formula."""
        return 6 * self.shape.num_parameters * self.tokens / seconds / 1e12


def _tokens_per_second(shape: Shape, rate: float) -> float:
    return 6 * shape.num_parameters * rate / 1e12


POINTS = (
    *(
        Point(shape=GPT3_13B, batch=batch, teraflops=teraflops, fitted=True)
        for batch, teraflops in ((8, 42.8), (16, 84.3), (32, 143.1), (64, 155.8), (128, 153.8))
    ),
    # Published as 50 and 83 tokens/s.
    Point(shape=GPT3_175B, batch=8, teraflops=_tokens_per_second(GPT3_175B, 50), fitted=False),
    Point(shape=GPT3_175B, batch=16, teraflops=_tokens_per_second(GPT3_175B, 83), fitted=False),
)


def fuyou_ceilings() -> Ceilings:
    """Return the testbed with Fuyou's software on it: the three constants, and the hardware's limits elsewhere."""
    read, write = READ_BYTES_PER_SECOND, WRITE_BYTES_PER_SECOND
    return Ceilings(
        name="fuyou on an RTX 4090 with 12 SSDs",
        has_device=True,
        device_memory_bytes=24 << 30,
        host_memory_bytes=768 * 10**9,
        cores=52,
        flops_per_second={"bfloat16": COMPUTE_FLOPS_PER_SECOND},
        host_to_device_bytes_per_second=24.5e9,
        device_to_host_bytes_per_second=24.5e9,
        both_ways_bytes_per_second=49e9,
        host_memory_bytes_per_second=300e9,
        update_bytes_per_second=150e9,
        update_bytes_per_second_per_core=10e9,
        # The constants were found with both directions at work, so nothing is left to share.
        drives=(
            Drive(
                read_bytes_per_second=read,
                write_bytes_per_second=write,
                mixed_bytes_per_second=read + write,
                capacity_bytes=12 * 3840 * 10**9,
            ),
        ),
    )


def fuyou_program(shape: Shape, tokens: int) -> Program:
    """Return one step of Fuyou's policy; it repeats itself."""
    return _Step(shape, tokens).build()


def simulate_fuyou(point: Point) -> float:
    """Return the simulated seconds per step of Fuyou's policy at a published point."""
    return simulate([fuyou_program(point.shape, point.tokens)] * 3, fuyou_ceilings()).step_seconds


def group_modules(modules: Sequence[int], smallest: int = _GROUP_ELEMENTS) -> list[range]:
    """Return the sub-groups, as ranges of modules: filled in order until they have `smallest` parameters."""
    groups, start, filled = [], 0, 0
    for index, parameters in enumerate(modules):
        filled += parameters
        if filled >= smallest or index == len(modules) - 1:
            groups.append(range(start, index + 1))
            start, filled = index + 1, 0
    return groups


class _Step:
    """Emits the operations of one step. A sub-group is a `unit` in what it updates, a module in what it computes."""

    def __init__(self, shape: Shape, tokens: int) -> None:
        self.modules, self.tokens = shape.modules, tokens
        # Two tensors of tokens x hidden per layer are kept; a third of that per module.
        self.stash_bytes = 2 * 2 * tokens * shape.hidden_size // 3
        self.ops: list[Op] = []
        self.fetched: dict[tuple[str, int], int] = {}
        self.used: list[int] = []
        self.first: int | None = None

    def emit(self, verb: Verb, lane: Lane, after: Sequence[int], **fields: Any) -> int:
        self.ops.append(Op(index=len(self.ops), verb=verb, lane=lane, after=tuple(after), **fields))
        return len(self.ops) - 1

    def build(self) -> Program:
        stashed = [self.forward(module) for module in range(len(self.modules))]
        last_write = self.backward(stashed)
        # No update spills into the next forward: its first fetch waits for the last write of the step before.
        first = self.ops[0]
        self.ops[0] = Op(
            index=0, verb=first.verb, lane=first.lane, unit=first.unit, bytes=first.bytes, after_previous=(last_write,)
        )
        return Program(tuple(self.ops))

    def fetch_window(self, order: Sequence[int], place: int, phase: str) -> int:
        """Fetch the module at `place` of `order` and those that the window allows; return its upload."""
        for ahead in range(place, min(place + _PREFETCH, len(order))):
            module = order[ahead]
            if (phase, module) not in self.fetched:
                # A place in the window is free when the module that many uses ago has been computed.
                free = self.used[-_PREFETCH + ahead - place :][:1] if len(self.used) >= _PREFETCH - (ahead - place) else []
                common: dict[str, Any] = {"unit": module, "bytes": 2 * self.modules[module]}
                fetch = self.emit(Verb.FETCH, Lane.SSD_READ, free, **common)
                self.fetched[phase, module] = self.emit(Verb.UPLOAD, Lane.HOST_TO_DEVICE, [fetch], **common)
        return self.fetched[phase, order[place]]

    def forward(self, module: int) -> int:
        upload = self.fetch_window(range(len(self.modules)), module, "forward")
        flops = 2.0 * self.modules[module] * self.tokens
        compute = self.emit(Verb.FORWARD, Lane.COMPUTE, [upload], unit=module, flops=flops)
        self.used.append(compute)
        return self.emit(Verb.OUT, Lane.DEVICE_TO_HOST, [compute], unit=module, bytes=self.stash_bytes, waiting=Waiting.INPUT)

    def backward(self, stashed: Sequence[int]) -> int:
        """Emit backward with the updates behind it; return the last write."""
        order = range(len(self.modules) - 1, -1, -1)
        groups = group_modules(self.modules)
        drains: dict[int, int] = {}
        written: list[int] = []
        recalled: dict[int, int] = {}
        for place, module in enumerate(order):
            # One stash ahead, and before the weights further ahead: the link works in this order.
            for ahead in order[place : place + 2]:
                if ahead not in recalled:
                    recalled[ahead] = self.recall(ahead, stashed[ahead])
            upload = self.fetch_window(order, place, "backward")
            flops = 4.0 * self.modules[module] * self.tokens
            compute = self.emit(Verb.BACKWARD, Lane.COMPUTE, [upload, recalled[module]], unit=module, flops=flops)
            self.used.append(compute)
            drains[module] = self.emit(Verb.DRAIN, Lane.DEVICE_TO_HOST, [compute], unit=module, bytes=2 * self.modules[module])
            if module == groups[-1].start:
                written.append(self.update(groups.pop(), drains, written))
        return written[-1]

    def recall(self, module: int, stashed: int) -> int:
        # It replaces the stash of the module computed last.
        after = [stashed, *self.used[-1:]]
        return self.emit(Verb.IN, Lane.HOST_TO_DEVICE, after, unit=module, bytes=self.stash_bytes, waiting=Waiting.INPUT)

    def update(self, group: range, drains: dict[int, int], written: list[int]) -> int:
        """Read master and moments (12 bytes), update, write them and the 16-bit weights (14 bytes); return the write."""
        elements = sum(self.modules[module] for module in group)
        common: dict[str, Any] = {"unit": group.start, "chunk": len(written)}
        free = written[-_STATE_BUFFERS:][:1] if len(written) >= _STATE_BUFFERS else []
        read = self.emit(Verb.READ_STATES, Lane.SSD_READ, free, bytes=12 * elements, **common)
        update = self.emit(Verb.UPDATE, Lane.UPDATE, [read, drains[group.start]], bytes=28 * elements, **common)
        return self.emit(Verb.WRITE_STATES, Lane.SSD_WRITE, [update], bytes=14 * elements, **common)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. `headrace_seconds` is the same machine under Headrace's own program, None if not given."""

    point: Point
    simulated_seconds: float
    headrace_seconds: float | None

    @property
    def ratio(self) -> float:
        """Simulated over published rate."""
        return self.point.seconds / self.simulated_seconds


def compare(headrace_seconds: Callable[[Point], float] | None = None) -> tuple[Row, ...]:
    """Simulate every published point; `headrace_seconds` gives a step time under another program, for one more column."""
    return tuple(
        Row(
            point=point,
            simulated_seconds=simulate_fuyou(point),
            headrace_seconds=None if headrace_seconds is None else headrace_seconds(point),
        )
        for point in POINTS
    )


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table in TFLOPS (6N formula) and tokens per second."""
    lines = [
        "| model | batch | published TFLOPS | simulated TFLOPS | simulated / published | published tok/s | simulated tok/s "
        "| Headrace TFLOPS | constants saw it |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        point, seconds = row.point, row.simulated_seconds
        own = "-" if row.headrace_seconds is None else f"{point.teraflops_at(row.headrace_seconds):.1f}"
        lines.append(
            f"| {point.shape.name} | {point.batch} | {point.teraflops:.1f} | {point.teraflops_at(seconds):.1f} "
            f"| {row.ratio:.3f} | {point.tokens / point.seconds:.0f} | {point.tokens / seconds:.0f} | {own} "
            f"| {'yes' if point.fitted else 'no'} |"
        )
    return "\n".join(lines) + "\n"
