"""Buffers of a plan, of whatever kind: a group is what one purpose takes in a tier. Those for weights are the same in all."""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.plan.placement import Placement
from headrace.plan.slots import SOURCE_SLOTS
from headrace.terms.sizes import PAGE_BYTES, round_up


@dataclass(frozen=True, slots=True)
class BufferGroup:
    """`count` buffers of `num_bytes` each, in `tier`, for `purpose` (a key of `Results.peak_bytes`)."""

    tier: str
    purpose: str
    count: int
    num_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes that the arena gives to the group: each buffer starts on a page."""
        return self.count * round_up(self.num_bytes, PAGE_BYTES)


def weight_groups(plan: Placement) -> dict[str, BufferGroup]:
    """Return by name the groups for weights. The compute tier is `device` where that is separate, else `host`."""
    compute_tier = "device" if plan.separate_device else "host"
    stored = max(map(plan.stored_bytes, plan.streamed_units), default=0)
    groups = {
        "host_weights": BufferGroup("host", "weights", plan.host_slots, stored),
        "resident_weights": BufferGroup(compute_tier, "weights", 1, sum(map(plan.resident_bytes, plan.resident_units))),
    }
    if plan.separate_device or plan.makes_slots:
        slot_bytes = plan.largest(plan.slot_bytes)
        groups["device_weights"] = BufferGroup(compute_tier, "weights", plan.device_slots, slot_bytes)
    if plan.separate_device and (sources := plan.largest(plan.source_bytes)):
        groups["sources"] = BufferGroup("device", "weights", SOURCE_SLOTS, sources)
    for unit in plan.units_with_family:
        groups[f"trained.{unit}"] = BufferGroup("host", "weights", 1, plan.completing_bytes(unit))
    return groups


def peak_rows(groups: Mapping[str, BufferGroup], runtime_bytes: int, *, separate_device: bool) -> dict[str, dict[str, int]]:
    """Return by tier and purpose what groups of buffers take, beside `runtime_bytes` of the interpreter."""
    rows: dict[str, dict[str, int]] = {"device": {}} if separate_device else {}
    rows["host"] = {"runtime": runtime_bytes}
    for group in groups.values():
        rows[group.tier][group.purpose] = rows[group.tier].get(group.purpose, 0) + group.total_bytes
    return rows
