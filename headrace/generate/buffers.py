"""The buffers of a generation's plan, in the types in which its verbs use them."""

from headrace.flow.weights import WeightBuffers
from headrace.generate.plan import GenerationPlan, generation_buffers
from headrace.generate.seat_caches import CacheBuffers
from headrace.machine.protocol import Machine


class GenerationBuffers(WeightBuffers):
    """The buffers of a generation's plan: for weights and caches. Index them by an operation's slots."""

    def __init__(self, plan: GenerationPlan, machine: Machine) -> None:
        groups = generation_buffers(plan)
        super().__init__(plan, groups, machine)
        host = [name for name, group in groups.items() if group.purpose == "cache" and group.tier == "host"]
        on_device, carried = self.take_compute("cache_on_device"), self.take_compute("cache_carried")
        self.caches = CacheBuffers(plan, {name: self.take_host(name) for name in host}, on_device, carried)
