"""The cost of operations on a machine: their seconds alone, and how lanes slow one another.

All that is known about a lane is its row in the table of lanes (`terms.program.Lane`). No clock, no files, no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from headrace.terms.lanes import Lane, sharing_lanes
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.program import Op, Verb

# Float32 products of a core beside a GPU, which no profile has: half of what eight lanes at 3 GHz do. Where an update
# multiplies matrices, it says that this is the GPU's work.
_HOST_CORE_FLOPS_PER_SECOND = 50e9

# So many modules with parts a block has at least: the first of them comes before there is anything to compute.
_PARTS_OF_A_BLOCK = 4
# Bytes of host memory that are moved to add a byte of a gradient to its sum, of twice the width.
_SUMMED_TRAFFIC = 5

# Where the CPU computes, these take turns.
_ON_CORES = frozenset({Lane.COMPUTE, Lane.ATTENTION})


class Rates:
    """Work and speeds of operations under given ceilings."""

    def __init__(self, ceilings: Ceilings, compute_dtype: str, compute_threads: int | None, update_threads: int | None) -> None:
        self.ceilings = ceilings
        self.flops_per_second = ceilings.matrix_flops_per_second(compute_dtype)
        if compute_threads is not None and not ceilings.has_device:
            self.flops_per_second *= min(1.0, compute_threads / ceilings.cores)
        measured = ceilings.device_memory_bytes_per_second if ceilings.has_device else ceilings.row_product_bytes_per_second
        self.memory_bytes_per_second = measured or ceilings.host_memory_bytes_per_second
        self.bytes_per_second: dict[Lane, float] = {
            lane: getattr(ceilings, lane.row.rate) for lane in Lane if lane.row.rate is not None
        }
        if update_threads is not None:
            capped = min(self.bytes_per_second[Lane.UPDATE], update_threads * ceilings.update_bytes_per_second_per_core)
            self.bytes_per_second[Lane.UPDATE] = capped
        self._overhead_seconds: dict[Lane, float] = {
            lane: getattr(ceilings, lane.row.overhead) if lane.row.overhead else 0.0 for lane in Lane
        }
        wide = ceilings.flops_per_second.get("float32", ceilings.matrix_flops_per_second(compute_dtype))
        core = _HOST_CORE_FLOPS_PER_SECOND if ceilings.has_device else wide / ceilings.cores
        self._product_rates = {
            Lane.DEVICE_UPDATE: self.flops_per_second,
            Lane.UPDATE: core * min(ceilings.cores, update_threads or ceilings.cores),
        }
        self.shares = sharing_lanes()
        self.speeds: Callable[[tuple[Lane, ...]], Mapping[Lane, float]] = cache(self._speeds)

    def alone_seconds(self, op: Op) -> float:
        """Return the seconds that `op` takes if nothing else runs."""
        lane = op.lane
        if lane is Lane.COMPUTE:
            seconds = self.compute_seconds(op.flops, op.bytes, op.calls)
            if op.verb is Verb.TURN:
                seconds += self.ceilings.turn_seconds
            if op.linked or op.leaving:
                seconds = self._of_parts(op, seconds)
            return seconds if op.calls and self.ceilings.operator_seconds else self._overhead_seconds[lane] + seconds
        rate = self.bytes_per_second.get(lane)
        seconds = self._overhead_seconds[lane] + (op.bytes / rate if rate else 0.0)
        # An update that multiplies matrices does so beside what it moves.
        return seconds + op.flops / self._product_rates[lane] if op.flops else seconds

    def _of_parts(self, op: Op, seconds: float) -> float:
        """Return what an operation takes that computes for so many `seconds`, and brings parts of a block itself.

        On a device with queues of its own all parts but the first come while another one is computed. Gradients leave in
        compute's queue, and this thread adds them to their sums.
        """
        coming = op.linked / self.bytes_per_second[Lane.HOST_TO_DEVICE]
        beside = min(seconds, coming) * (1 - 1 / _PARTS_OF_A_BLOCK) if self.ceilings.has_device else 0.0
        leaving = op.leaving / self.bytes_per_second[Lane.DEVICE_TO_HOST]
        return seconds + coming - beside + leaving + _SUMMED_TRAFFIC * op.leaving / self.ceilings.host_memory_bytes_per_second

    def compute_seconds(self, flops: float, num_bytes: float, calls: int = 0) -> float:
        """Return what computing takes that reads so many bytes of its memory, by so many calls of operators.

        A product with few rows takes as long as reading its weights. Python begins one operator after the other: a device works
        on those that were begun meanwhile, a processor does not.
        """
        seconds = roofline_seconds(flops, self.flops_per_second, (num_bytes, self.memory_bytes_per_second))
        begun = calls * self.ceilings.operator_seconds
        return max(seconds, begun) if self.ceilings.has_device else seconds + begun

    def shared_factor(self, lanes: Sequence[Lane]) -> float:
        """Return the share of its own rate that each of `lanes`, which share one thing, keeps while all of them are busy."""
        share = lanes[0].row.shares
        if share is None or share.rate is None or len(lanes) < 2:
            return 1.0
        together: float = getattr(self.ceilings, share.rate)
        return min(1.0, together / sum(self.bytes_per_second[lane] for lane in lanes))

    def _speeds(self, active: tuple[Lane, ...]) -> Mapping[Lane, float]:
        """Return the speed of each lane of `active` (in the table's order) while all of these are busy."""
        shared = dict.fromkeys(active, 1.0)
        for lanes in self.shares.values():
            busy = [lane for lane in lanes if lane in shared]
            if busy:
                shared |= dict.fromkeys(busy, self.shared_factor(busy))
        speed = dict(shared)
        for lane in active:
            slowdowns = {**self._in_turn(lane), **self.ceilings.slowdowns.get(lane, {})}
            for other in active:
                # The figure was measured while the other lane had its full rate. At half of its rate it slows this one half as
                # much.
                speed[lane] *= 1 - (1 - slowdowns.get(other, 1.0)) * shared[other]
        # Every byte that a transfer or the update moves crosses the host's memory bus once.
        moving = [lane for lane in active if lane.row.on_bus]
        traffic = sum(speed[lane] * self.bytes_per_second[lane] for lane in moving)
        # Each lane's own rate was measured over the bus, so only several lanes together can exceed it.
        if len(moving) > 1 and traffic > self.ceilings.host_memory_bytes_per_second:
            for lane in moving:
                speed[lane] *= self.ceilings.host_memory_bytes_per_second / traffic
        return speed

    def _in_turn(self, lane: Lane) -> Mapping[str, float]:
        """Return the share that a lane keeps beside those with which it shares a thing that has no figure."""
        share = lane.row.shares
        others = {lane, *(() if share is None or share.rate else self.shares[share])}
        if not self.ceilings.has_device and lane in _ON_CORES:
            others |= _ON_CORES
        return dict.fromkeys(others - {lane}, 0.5)


def roofline_seconds(flops: float, peak: float, *moved: tuple[float, float]) -> float:
    """Return the seconds of `flops` operations at `peak` per second: the slowest decides, compute or a way of its operands.

    It is the hierarchical roofline of MoE-Lightning (arXiv 2411.11217, section 3).
    `moved` has for each level the bytes that cross it and its bytes per second; all cross at once.
    """
    return max([flops / peak, *[num_bytes / bandwidth for num_bytes, bandwidth in moved]])
