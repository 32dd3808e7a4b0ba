"""The buffers of a generation's plan, in the types in which its verbs use them."""

from headrace.flow.weights import WeightBuffers
from headrace.generate.plan import GenerationPlan, generation_buffers
from headrace.generate.seat_caches import CacheBuffers
from headrace.machine.protocol import Machine


class GenerationBuffers(WeightBuffers):
    """The buffers of a generation's plan: for weights, single experts and caches. Index them by an operation's slots."""

    def __init__(self, plan: GenerationPlan, machine: Machine) -> None:
        groups = generation_buffers(plan)
        super().__init__(plan, groups, machine)
        self.experts, self.cached_experts = self.take_host("experts"), self.take_host("cached_experts")
        self.device_experts = [tensor.view(self.dtype) for tensor in self.take_compute("device_experts")]
        self.expert_sources = self.take_compute("expert_sources")
        host = [name for name, group in groups.items() if group.purpose == "cache" and group.tier == "host"]
        on_device, carried = self.take_compute("cache_on_device"), self.take_compute("cache_carried")
        self.caches = CacheBuffers(plan, {name: self.take_host(name) for name in host}, on_device, carried)
