"""Buffers of a plan, of whatever kind: a group is what one purpose takes in a tier. Those for weights are the same in all."""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.plan.value.placement import Placement
from headrace.plan.value.slots import SOURCE_SLOTS
from headrace.terms.sizes import PAGE_BYTES, round_up


@dataclass(frozen=True, slots=True)
class BufferGroup:
    """`count` buffers of `num_bytes` each, in `tier`, for `purpose` (a key of `Results.peak_bytes`). Ranks of one machine may
    have one copy of a group that `is_shared`.
    """

    tier: str
    purpose: str
    count: int
    num_bytes: int
    is_shared: bool = False

    @property
    def total_bytes(self) -> int:
        """Bytes that the arena gives to the group: each buffer starts on a page."""
        return self.count * round_up(self.num_bytes, PAGE_BYTES)

    def counted_bytes(self, sharers: int) -> int:
        """Return what of that counts for one of so many ranks of a machine."""
        return -(-self.total_bytes // sharers) if self.is_shared else self.total_bytes


def weight_groups(plan: Placement) -> dict[str, BufferGroup]:
    """Return by name the groups for weights. The compute tier is `device` where that is separate, else `host`."""
    compute_tier = "device" if plan.separate_device else "host"
    sizes = plan.weight_sizes
    groups = {
        "host_weights": BufferGroup("host", "weights", plan.host_slots, sizes.streamed, is_shared=True),
        "resident_weights": BufferGroup(compute_tier, "weights", 1, sizes.resident, is_shared=not plan.separate_device),
    }
    if plan.separate_device or plan.makes_slots:
        groups["device_weights"] = BufferGroup(compute_tier, "weights", plan.device_slots, sizes.slot)
    if plan.separate_device and sizes.source:
        groups["sources"] = BufferGroup("device", "weights", SOURCE_SLOTS, sizes.source)
    for unit, num_bytes in sizes.trained:
        groups[f"trained.{unit}"] = BufferGroup("host", "weights", 1, num_bytes, is_shared=True)
    return groups


def peak_rows(
    groups: Mapping[str, BufferGroup], runtime_bytes: int, *, separate_device: bool, sharers: int = 1
) -> dict[str, dict[str, int]]:
    """Return by tier and purpose what groups of buffers take, beside `runtime_bytes` of the interpreter, for one of so many
    ranks that share memory.
    """
    rows: dict[str, dict[str, int]] = {"device": {}} if separate_device else {}
    rows["host"] = {"runtime": runtime_bytes}
    for group in groups.values():
        rows[group.tier][group.purpose] = rows[group.tier].get(group.purpose, 0) + group.counted_bytes(sharers)
    return rows
