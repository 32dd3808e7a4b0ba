"""The buffers of a generation's plan, in the types in which its verbs use them."""

import torch

from headrace.flow.arena import TORCH_DTYPES, DeviceArena
from headrace.generate.cache_plan import CACHE_GROUPS
from headrace.generate.plan import GenerationPlan, generation_buffers
from headrace.generate.seat_caches import CacheBuffers
from headrace.machine.arena import Arena
from headrace.machine.host_memory import Bytes
from headrace.machine.protocol import Machine
from headrace.terms.program import Op, Pool
from headrace.terms.sizes import PAGE_BYTES, round_up


class GenerationBuffers:
    """The buffers of a generation's plan, taken from one arena per tier. Index them by an operation's slots."""

    def __init__(self, plan: GenerationPlan, machine: Machine) -> None:
        self.plan, self.dtype = plan, TORCH_DTYPES[plan.compute_dtype]
        self._groups = generation_buffers(plan)
        sizes = {"host": 0, "device": 0}
        for tier, count, num_bytes in self._groups.values():
            sizes[tier] += count * round_up(num_bytes, PAGE_BYTES)
        self._host = Arena("host", sizes["host"], machine.host_buffer)
        self._device = DeviceArena(machine, sizes["device"]) if plan.separate_device else None
        self.host_weights = [self._host.take(size, "weights") for size in self._sizes("host_weights")]
        self.device_weights = [tensor.view(self.dtype) for tensor in self._take_compute("device_weights")]
        self.sources = self._take_compute("sources")
        self.experts = [self._host.take(size, "experts") for size in self._sizes("experts")]
        self.cached_experts = [self._host.take(size, "experts") for size in self._sizes("cached_experts")]
        self.device_experts = [tensor.view(self.dtype) for tensor in self._take_compute("device_experts")]
        self.expert_sources = self._take_compute("expert_sources")
        self.trained: dict[int, Bytes] = {}
        for unit in plan.units_with_family:
            self.trained[unit] = self._host.take(plan.completing_bytes(unit), "trained")
        host = {
            name: [self._host.take(size, name) for size in self._sizes(name)]
            for name, group in self._groups.items()
            if name.startswith(CACHE_GROUPS) and group[0] == "host"
        }
        self.caches = CacheBuffers(plan, host, self._take_compute("cache_on_device"), self._take_compute("cache_carried"))
        self.residents: dict[int, torch.Tensor] = {}
        flat, start = self._take_compute("resident_weights")[0], 0
        for unit in plan.resident_units:
            size = plan.slot_bytes(unit)
            self.residents[unit] = flat[start : start + size].view(self.dtype)
            start += round_up(size, PAGE_BYTES)

    def stored(self, unit: int, slot: int) -> Bytes:
        """Return a unit's bytes as they were read into a slot."""
        return self.host_weights[slot][: self.plan.stored_bytes(unit)]

    def computed(self, unit: int, op: Op) -> torch.Tensor:
        """Return the weights of a unit that compute reads, in the slot that the operation names."""
        slot = op.slot(Pool.DEVICE_WEIGHTS)
        if slot >= 0:
            return self.device_weights[slot][: self.plan.units[unit].num_elements]
        return torch.from_numpy(self.stored(unit, op.slot(Pool.HOST_WEIGHTS))).view(self.dtype)

    def _sizes(self, name: str) -> list[int]:
        _, count, num_bytes = self._groups.get(name, ("", 0, 0))
        return [num_bytes] * count

    def _take_compute(self, name: str) -> list[torch.Tensor]:
        if self._device is not None:
            return [self._device.take(size) for size in self._sizes(name)]
        return [torch.from_numpy(self._host.take(size, name)) for size in self._sizes(name)]
