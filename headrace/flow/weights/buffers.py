"""The buffers of a run: those for weights, and those for states, gradients and what waits for backward."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.flow.weights.arena import TORCH_DTYPES
from headrace.flow.weights.weights import WeightBuffers
from headrace.machine.host_memory import Bytes
from headrace.machine.protocol import Machine
from headrace.model.parts.part_slots import PartSlots
from headrace.plan.value.buffer_sizes import buffer_groups
from headrace.plan.value.plan import Plan

# How NumPy sees a gradient. It has no bfloat16, so it gets the bits.
GRADIENT_VIEWS: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


class Buffers(WeightBuffers):
    """All buffers of a run, in handlers' types: NumPy on the host, torch for compute. Index them by an operation's slots.

    `states[slot]`, `gradients[slot]`, `stash[slot]`, `parking[slot]` and `parked[unit]` are uint8 arrays. On the device
    `device_states[slot]`, each for all planes and the gradient of one chunk, are uint8 tensors. `part_slots` have parts of
    blocks, and `leaving_gradients` gradients of parts.
    """

    def __init__(self, plan: Plan, machine: Machine, shared: Callable[[int], Bytes] | None = None) -> None:
        super().__init__(plan, buffer_groups(plan), machine, shared)
        self.plan = plan
        self.visitor = plan.ends[-1] if plan.visits else None
        self.gradient_dtype = TORCH_DTYPES[plan.gradients.dtype]
        self.states = self.take_host("states")
        self.stash = self.take_host("stash")
        self.host_stash = {block: self.take_host(f"stash.{block}") for block in plan.blocks_stashed_on("host")}
        self.between = self.take_host("between")
        in_memory = set(plan.parked_units).difference(plan.parked_on_ssd)
        self.parked, self.parking = {unit: self.take_host(f"parked.{unit}")[0] for unit in in_memory}, self.take_host("parking")
        self.gradients, self._ends_in_place = self._take_gradients(), plan.ends_in_place
        self.resident_states = {unit: self.take_host(f"resident_states.{unit}")[0] for unit in plan.updates.resident_states}
        parts = [each.view(self.dtype) for each in self.take_compute("part_weights")]
        self.part_slots = PartSlots(parts, machine)
        self.leaving_gradients = [each.view(self.dtype) for each in self.take_compute("leaving_gradients")]
        self.device_states = self.take_compute("device_states")
        summed = torch.float32 if plan.gradients.accumulate else self.gradient_dtype
        self._accumulator = [each.view(summed) for each in self.take_compute("accumulator")]
        self.expert_sums = [each.view(summed) for each in self.take_compute("expert_sums")]
        self.parked_experts = [torch.from_numpy(each).view(summed) for each in self.take_host("parked_experts")]
        self._resident_accumulator = [each.view(torch.float32) for each in self.take_compute("resident_accumulator")]

    def accumulator(self, unit: int, slot: int, partial: int = 0) -> torch.Tensor | None:
        """Return where backward sums a unit's gradient before it is drained, for a block in `slot`. None if it is made directly
        in its host buffer.

        A block's accumulator has the gradient's dtype if a step has one micro-batch, else fp32. Those of prologue and epilogue
        are fp32, and share their memory unless weights are tied (see `Plan.ends_in_place`). `partial`: one of a tree's partial
        sums; 0 has the total in the end.
        """
        plan = self.plan
        if self._ends_in_place if unit in plan.ends else plan.gradient_in_place:
            return None
        whole = self._resident_accumulator[partial] if unit in plan.ends else self._accumulator[slot + partial]
        start = plan.units[0].gradient_elements if unit in plan.ends and unit and plan.tied else 0
        return whole[start : start + plan.summed_elements(unit)]

    def gradient(self, unit: int, slot: int) -> NDArray[Any]:
        """Return a drained gradient in NumPy's types (bfloat16 as bits)."""
        dtype = GRADIENT_VIEWS[self.plan.gradients.dtype]
        return self.gradient_bytes(unit, slot).view(dtype)

    def gradient_bytes(self, unit: int, slot: int) -> Bytes:
        """Return a drained gradient as bytes."""
        return self.gradients[slot][: self.plan.gradient_bytes(unit)]

    def gradient_tensor(self, unit: int, slot: int) -> torch.Tensor:
        """Return a drained gradient as torch sees it."""
        return torch.from_numpy(self.gradient_bytes(unit, slot)).view(self.gradient_dtype)

    def _take_gradients(self) -> dict[int, Bytes]:
        plan = self.plan
        taken, slot_of = dict(enumerate(self.take_host("gradients"))), plan.gradient_slot_of
        if resident := self.take_host("resident_gradient"):
            taken[plan.gradients.slots] = resident[0]
        return taken | {slot_of[unit]: self.take_host(f"gradient.{unit}")[0] for unit in plan.with_own_gradient}
