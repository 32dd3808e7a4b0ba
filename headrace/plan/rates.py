"""What operations take on a machine: their seconds alone, and what lanes leave of one another's speed.

No clock, no files, no torch.
"""

from collections.abc import Callable, Mapping
from functools import cache

from headrace.terms.ceilings import Ceilings
from headrace.terms.program import Lane, Op, Verb

LANES = tuple(Lane)
PLACE = {lane: place for place, lane in enumerate(LANES)}
# The places of the lanes in a bit mask, for each mask.
PLACES = [tuple(place for place in range(len(LANES)) if mask >> place & 1) for mask in range(1 << len(LANES))]
ALL_LANES = len(PLACES) - 1
# Where a profile says nothing: compute and updates on the device share the device, and together do no more than in turn.
_SLOWDOWNS: Mapping[str, Mapping[str, float]] = {
    Lane.COMPUTE: {Lane.DEVICE_UPDATE: 0.5},
    Lane.DEVICE_UPDATE: {Lane.COMPUTE: 0.5},
}


class Rates:
    """Work and speeds of operations under given ceilings."""

    def __init__(self, ceilings: Ceilings, compute_dtype: str, compute_threads: int | None, update_threads: int | None) -> None:
        self.ceilings = ceilings
        self.flops_per_second = ceilings.matrix_flops_per_second(compute_dtype)
        if compute_threads is not None and not ceilings.has_device:
            self.flops_per_second *= min(1.0, compute_threads / ceilings.cores)
        update_rate = ceilings.update_bytes_per_second
        if update_threads is not None:
            update_rate = min(update_rate, update_threads * ceilings.update_bytes_per_second_per_core)
        self.bytes_per_second = {
            Lane.SSD_READ: ceilings.ssd_read_bytes_per_second,
            Lane.SSD_WRITE: ceilings.ssd_write_bytes_per_second,
            Lane.HOST_TO_DEVICE: ceilings.host_to_device_bytes_per_second,
            Lane.DEVICE_TO_HOST: ceilings.device_to_host_bytes_per_second,
            Lane.UPDATE: update_rate,
        }
        self.shares = {
            (Lane.SSD_READ, Lane.SSD_WRITE): ceilings.ssd_mixed_bytes_per_second,
            (Lane.HOST_TO_DEVICE, Lane.DEVICE_TO_HOST): ceilings.both_ways_bytes_per_second,
        }
        self.speeds: Callable[[int], tuple[tuple[int, float], ...]] = cache(self._speeds)

    def alone_seconds(self, op: Op) -> float:
        """Return what `op` takes if nothing else runs."""
        ceilings = self.ceilings
        if op.verb is Verb.COMMIT:
            return ceilings.commit_seconds
        if op.lane is Lane.COMPUTE:
            return ceilings.launch_seconds + op.flops / self.flops_per_second
        if op.lane is Lane.UPDATE:
            return op.bytes / self.bytes_per_second[Lane.UPDATE]
        if op.lane is Lane.DEVICE_UPDATE:
            return ceilings.launch_seconds + op.bytes / ceilings.device_update_bytes_per_second
        if op.lane is Lane.COMMIT:
            return 0.0
        return ceilings.transfer_seconds + op.bytes / self.bytes_per_second[op.lane]

    def shared_factor(self, pair: tuple[Lane, Lane]) -> float:
        """Return the share of its own rate that each lane of a pair keeps while both are busy."""
        one, other = pair
        return min(1.0, self.shares[pair] / (self.bytes_per_second[one] + self.bytes_per_second[other]))

    def _speeds(self, busy: int) -> tuple[tuple[int, float], ...]:
        """Return the place and the speed of each lane of bit mask `busy` while all of these are busy."""
        active = [LANES[place] for place in PLACES[busy]]
        shared = dict.fromkeys(LANES, 1.0)
        for pair in (pair for pair in self.shares if all(lane in active for lane in pair)):
            shared |= dict.fromkeys(pair, self.shared_factor(pair))
        speed = dict(shared)
        for lane in active:
            slowdowns = {**_SLOWDOWNS.get(lane, {}), **self.ceilings.slowdowns.get(lane, {})}
            for other in active:
                # Measured beside all of the other's rate; what moves half as much disturbs half as much.
                speed[lane] *= 1 - (1 - slowdowns.get(other, 1.0)) * shared[other]
        # Every byte that a transfer or the update moves crosses the host's memory bus once.
        moving = [lane for lane in active if lane in self.bytes_per_second]
        traffic = sum(speed[lane] * self.bytes_per_second[lane] for lane in moving)
        # A lane alone is measured with the bus under it, so only lanes together can ask for too much.
        if len(moving) > 1 and traffic > self.ceilings.host_memory_bytes_per_second:
            for lane in moving:
                speed[lane] *= self.ceilings.host_memory_bytes_per_second / traffic
        return tuple((PLACE[lane], speed[lane]) for lane in active)
