"""The buffers of a generation's plan, in the types in which its verbs use them."""

from headrace.flow.weights.weights import WeightBuffers
from headrace.generate.passes.seat_caches import CacheBuffers
from headrace.generate.plan.plan import GenerationPlan, generation_buffers
from headrace.machine.protocol import Machine
from headrace.model.seats.attention_errors import AttentionErrors
from headrace.terms.events import Notice, Sink


class GenerationBuffers(WeightBuffers):
    """The buffers of a generation's plan: for weights and caches. Index them by an operation's slots."""

    def __init__(self, plan: GenerationPlan, machine: Machine, sink: Sink) -> None:
        groups = generation_buffers(plan)
        super().__init__(plan, groups, machine)
        on_compute = {name: self.take_compute(name) for name in ("cache_on_device", "cache_carried", "cache_resident")}
        caches = {name for name, group in groups.items() if group.purpose == "cache" and group.tier == "host"}
        host = sorted(caches - on_compute.keys())
        self.caches = CacheBuffers(plan, {name: self.take_host(name) for name in host}, on_compute, _errors(plan, sink))


def _errors(plan: GenerationPlan, sink: Sink) -> AttentionErrors | None:
    """Return what measures coded caches; None where none are. Blocks whose experts come one by one are not measured."""
    coded = [block for block in range(1, plan.num_blocks + 1) if plan.costs.is_coded(block)]
    if plan.costs.coded is None or not coded:
        return None
    whole = [block for block in coded if plan.experts is None or not plan.experts.figures.num_experts[block]]
    return AttentionErrors(plan.costs.coded.name, whole, lambda text: sink(Notice(text=text, level="info")))
