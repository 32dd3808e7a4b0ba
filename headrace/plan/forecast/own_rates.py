"""The machine as a run's own steps show it: the rates at which a plan's forecast keeps each lane busy for as long as it was.

Operations were timed beside one another, and so does the forecast time them. So what is compared is busy seconds with busy
seconds, and what lanes take from one another is not counted twice. Figures of lanes that did nothing stay as they were.

No clock, no files, no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.plan.forecast.forecast import forecast
from headrace.plan.value.plan import Plan
from headrace.terms.lanes import Lane
from headrace.terms.machine.ceilings import Ceilings

# The name of a machine with such figures, and what its `sources` say of them.
NAME, SOURCE = "this machine", "operations of the run"
# A rate that changes the speed of others is found again; after so many rounds nothing changes by a percent.
_ROUNDS = 4
# No figure changes by more than this factor in a round: a lane that waited for another tells little.
_MOST = 32.0
# The lanes that a plan may load more or less, whose rates are therefore needed before another plan is taken.
_LOADED = (Lane.COMPUTE, Lane.SSD_READ, Lane.SSD_WRITE, Lane.HOST_TO_DEVICE, Lane.DEVICE_TO_HOST, Lane.UPDATE)
# Another plan must be forecast this much faster.
_WORTH = 1.1


@dataclass(frozen=True, slots=True)
class Seen:
    """What a lane did in some steps: the seconds for which it was busy, the bytes that it moved, and its operations."""

    seconds: float
    bytes: int
    operations: int


def machine_of_steps(plan: Plan, assumed: Ceilings, seen: Mapping[Lane, Seen], steps: int) -> Ceilings:
    """Return `assumed`, the machine for which `plan` was made, with the rates of what was `seen` in so many `steps` of it."""
    machine = replace(
        assumed, name=NAME, sources={**assumed.sources, **{name: SOURCE for lane in seen for name in _FIGURES.get(lane, ())}}
    )
    if (commits := seen.get(Lane.COMMIT)) and commits.operations:
        machine = replace(machine, commit_seconds=commits.seconds / commits.operations)
    for _ in range(_ROUNDS):
        found = forecast(plan, machine).timeline
        for lane, has in seen.items():
            use = found.lanes[lane]
            if lane not in _LOADED or not has.seconds or not use.busy_seconds:
                continue
            # Of lanes that move bytes, those that were moved: steps that are no checkpoints write less.
            share = has.bytes / use.bytes if use.bytes and has.bytes and lane is not Lane.COMPUTE else steps
            factor = use.busy_seconds * share / has.seconds
            machine = _faster(machine, lane, min(max(factor, 1 / _MOST), _MOST))
    return machine


def is_worth_taking(plan: Plan, now: Plan, machine: Ceilings, seen: Mapping[Lane, Seen]) -> float | None:
    """Return the forecast seconds of a step under `plan`, if they are a tenth fewer than under `now`; else None. A plan that
    keeps a lane busy of which nothing was `seen` is not worth it: its forecast rests on a guess.
    """
    found = forecast(plan, machine)
    unseen = [lane for lane in _LOADED if found.timeline.lanes[lane].busy_seconds and lane not in seen]
    if unseen or found.step_seconds * _WORTH > forecast(now, machine).step_seconds:
        return None
    return found.step_seconds


# By lane, the figures that follow from it.
_FIGURES: dict[Lane, tuple[str, ...]] = {
    Lane.COMPUTE: ("flops_per_second",),
    Lane.SSD_READ: ("drives",),
    Lane.SSD_WRITE: ("drives",),
    Lane.HOST_TO_DEVICE: ("host_to_device_bytes_per_second",),
    Lane.DEVICE_TO_HOST: ("device_to_host_bytes_per_second",),
    Lane.UPDATE: ("update_bytes_per_second", "update_bytes_per_second_per_core"),
    Lane.COMMIT: ("commit_seconds",),
}


def _faster(machine: Ceilings, lane: Lane, factor: float) -> Ceilings:
    """Return the machine with a lane that is faster by `factor`. Figures of several lanes together stay within theirs."""
    changes: dict[str, Any] = {}
    if lane is Lane.COMPUTE:
        changes["flops_per_second"] = {dtype: rate * factor for dtype, rate in machine.flops_per_second.items()}
    elif lane in (Lane.SSD_READ, Lane.SSD_WRITE):
        name = "read_bytes_per_second" if lane is Lane.SSD_READ else "write_bytes_per_second"
        drives = [replace(drive, **{name: getattr(drive, name) * factor}) for drive in machine.drives]
        # Half of what both directions do together is this one's.
        mixed = [drive.mixed_bytes_per_second * factor**0.5 for drive in drives]
        both = [drive.read_bytes_per_second + drive.write_bytes_per_second for drive in drives]
        changes["drives"] = tuple(
            replace(drive, mixed_bytes_per_second=min(together, most))
            for drive, together, most in zip(drives, mixed, both, strict=True)
        )
    else:
        changes |= {name: getattr(machine, name) * factor for name in _FIGURES[lane]}
    machine = replace(machine, **changes)
    ways = machine.host_to_device_bytes_per_second + machine.device_to_host_bytes_per_second
    together = machine.both_ways_bytes_per_second * (factor**0.5 if lane in (Lane.HOST_TO_DEVICE, Lane.DEVICE_TO_HOST) else 1)
    return replace(
        machine,
        both_ways_bytes_per_second=min(together, ways),
        # What was seen to cross the memory bus, it can do.
        host_memory_bytes_per_second=max(machine.host_memory_bytes_per_second, machine.update_bytes_per_second),
    )
