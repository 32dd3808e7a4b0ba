"""The buffers of a plan, taken from one arena per tier, in handlers' types: NumPy on the host, torch for compute."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.flow.arena import TORCH_DTYPES, DeviceArena
from headrace.machine.arena import Arena
from headrace.machine.host_memory import Bytes
from headrace.machine.protocol import Machine
from headrace.plan.buffer_sizes import arena_bytes, buffer_groups
from headrace.plan.plan import Plan

# How NumPy sees a gradient. It has no bfloat16, so it gets the bits.
GRADIENT_VIEWS: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


class Buffers:
    """All buffers of a run. Index them by an operation's slots.

    `host_weights[slot]`, `states[slot]`, `gradients[slot]`, `stash[slot]` and `trained[unit]` (followed by its basis) are uint8
    arrays. On the device, `device_states[slot]`, each for all planes and the gradient of one chunk, and `sources[slot]`, from
    which weights are made, are uint8 tensors.
    """

    def __init__(self, plan: Plan, machine: Machine) -> None:
        self.plan = plan
        self._groups = buffer_groups(plan)
        self._host = Arena("host", arena_bytes(plan, "host"), machine.host_buffer)
        self._device = DeviceArena(machine, arena_bytes(plan, "device")) if plan.separate_device else None
        self.dtype = TORCH_DTYPES[plan.compute_dtype]
        self.gradient_dtype = TORCH_DTYPES[plan.gradient_dtype]
        self.host_weights = self._take_host("host_weights")
        self.states = self._take_host("states")
        self.stash = self._take_host("stash")
        self.host_stash = {block: self._take_host(f"stash.{block}") for block in plan.blocks_stashed_on("host")}
        self.gradients = self._take_gradients()
        self.resident_states = {unit: self._take_host(f"resident_states.{unit}")[0] for unit in plan.resident_states}
        self.staging = self._take_host("resident_staging")[0] if plan.separate_device else None
        self.trained = {
            unit: self._take_host(f"trained.{unit}")[0] for unit in plan.updated_units if plan.completing_bytes(unit)
        }
        self._device_weights = [tensor.view(self.dtype) for tensor in self._take_compute("device_weights")]
        self.sources = self._take_compute("sources")
        self.device_states = self._take_compute("device_states")
        self.resident_weights = self._split_residents(self._take_compute("resident_weights")[0])
        summed = torch.float32 if plan.accumulate else self.gradient_dtype
        self._accumulator = [each.view(summed) for each in self._take_compute("accumulator")]
        self._resident_accumulator = [each.view(torch.float32) for each in self._take_compute("resident_accumulator")]

    def stored(self, unit: int, slot: int) -> Bytes:
        """Return a unit's weights in host memory, as they lie on the drive: those in `slot`; -1: those that always stay."""
        if slot < 0:
            return self.resident_host_weights(unit)
        return self.host_weights[slot][: self.plan.stored_bytes(unit)]

    def computed(self, unit: int, host_slot: int, device_slot: int) -> torch.Tensor:
        """Return the weights of a unit that compute reads: in a slot of their own, or in their host buffer."""
        if device_slot >= 0:
            return self._device_weights[device_slot][: self.plan.units[unit].num_elements]
        return _as_tensor(self.stored(unit, host_slot), self.dtype)

    def accumulator(self, unit: int, slot: int, partial: int = 0) -> torch.Tensor | None:
        """Return where backward sums a unit's gradient before it is drained, for a block in `slot`. None if it is made directly
        in its host buffer.

        A block's accumulator has the gradient's dtype if a step has one micro-batch, else fp32. Those of prologue and epilogue
        are fp32, and share their memory unless weights are tied. `partial`: one of a tree's partial sums; 0 has the total in
        the end.
        """
        plan = self.plan
        if unit not in plan.ends and plan.gradient_in_place:
            return None
        whole = self._resident_accumulator[partial] if unit in plan.ends else self._accumulator[slot + partial]
        start = plan.units[0].gradient_elements if unit in plan.ends and unit and plan.tied else 0
        return whole[start : start + plan.units[unit].gradient_elements]

    def resident_host_weights(self, unit: int) -> Bytes:
        """Return where the host updates a resident unit's weights: in their place, or in the staging buffer."""
        if self.staging is not None:
            return self.staging[: self.plan.stored_bytes(unit)]
        return self.resident_weights[unit].view(torch.uint8).numpy()

    def gradient(self, unit: int, slot: int) -> NDArray[Any]:
        """Return a drained gradient in NumPy's types (bfloat16 as bits)."""
        dtype = GRADIENT_VIEWS[self.plan.gradient_dtype]
        return self.gradient_bytes(unit, slot).view(dtype)

    def gradient_bytes(self, unit: int, slot: int) -> Bytes:
        """Return a drained gradient as bytes."""
        return self.gradients[slot][: self.plan.gradient_bytes(unit)]

    def gradient_tensor(self, unit: int, slot: int) -> torch.Tensor:
        """Return a drained gradient as torch sees it."""
        return _as_tensor(self.gradient_bytes(unit, slot), self.gradient_dtype)

    def _take_host(self, name: str) -> list[Bytes]:
        group = self._groups.get(name)
        return [self._host.take(group.num_bytes, name) for _ in range(group.count)] if group else []

    def _take_compute(self, name: str) -> list[torch.Tensor]:
        group = self._groups.get(name)
        if group is None:
            return []
        if self._device is not None:
            return [self._device.take(group.num_bytes) for _ in range(group.count)]
        return [torch.from_numpy(buffer) for buffer in self._take_host(name)]

    def _take_gradients(self) -> dict[int, Bytes]:
        plan = self.plan
        taken, slot_of = dict(enumerate(self._take_host("gradients"))), plan.gradient_slot_of
        if resident := self._take_host("resident_gradient"):
            taken[plan.gradient_slots] = resident[0]
        return taken | {slot_of[unit]: self._take_host(f"gradient.{unit}")[0] for unit in plan.held_in_memory}

    def _split_residents(self, memory: torch.Tensor) -> dict[int, torch.Tensor]:
        flat, start, parts = memory.view(self.dtype), 0, {}
        for unit in self.plan.resident_units:
            stop = start + self.plan.units[unit].num_elements
            parts[unit] = flat[start:stop]
            start = stop
        return parts


def _as_tensor(buffer: Bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(buffer).view(dtype)
