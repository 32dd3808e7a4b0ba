"""What a block costs whose experts are parts: it runs on shapes alone, and one expert gets all tokens, which is the most.

Invariant: all that a micro-batch holds while others are at the experts is counted as waiting.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headrace.model.adapters.adapters import Adapters, BesideExperts
from headrace.model.chain.chain import Chain
from headrace.model.costs.cost_meter import CostMeter
from headrace.model.parts.banks import BlockExperts
from headrace.model.parts.parted_experts import PartedExperts, Recompute, Visit


def part_experts(chain: Chain, blocks: Sequence[BlockExperts | None], *, trained: bool = False) -> None:
    """Have blocks of a chain stop at these experts from here on; `trained`: they are trained themselves."""
    names = {id(module): name for name, module in chain.model.named_modules()}

    def beside(module: nn.Module) -> BesideExperts | None:
        return chain.adapters.beside_experts(names[id(module)]) if isinstance(chain.adapters, Adapters) else None

    chain.parts = PartedExperts(blocks, beside, trained=trained)
    chain.parts.install()


class PartedOnShapes:
    """Takes a block through its experts, twice: forward, and with a graph. `waiting_bytes` are those of each,
    `waiting_alone_bytes` those in backward without the graph.

    `more_flops` are the operations of the experts that tokens go to besides the one that was measured.
    """

    def __init__(self, chain: Chain, experts: BlockExperts) -> None:
        assert chain.parts is not None, "experts of the chain are parts"
        self._parts, self.weights = chain.parts, dict[str, Tensor]()
        for name in experts.names:
            shape = experts.module._parameters[name].shape  # type: ignore[union-attr]
            self.weights[name] = torch.zeros((1, *shape[1:]), dtype=chain.dtype, device=chain.device)
        self.waiting_bytes, self.waiting_alone_bytes = (0, 0), 0
        self.more_flops, self.choices = 0.0, 0
        self._meter: CostMeter | None = None
        self._again: Recompute | None = None

    @classmethod
    def of(cls, chain: Chain, index: int) -> "PartedOnShapes | None":
        """Return what measures block `index` (from 0) of a chain; None where it comes as a whole."""
        experts = chain.parts.experts_of(chain.runner.blocks[index]) if chain.parts is not None else None
        return None if experts is None else cls(chain, experts)

    @contextmanager
    def measured_by(self, meter: CostMeter) -> Iterator[None]:
        """Make the context in which the block runs."""
        self._meter = meter
        with self._parts.visited_by(self):
            yield

    def at_experts(self, visit: Visit) -> Tensor:
        """See `Visitor`."""
        assert self._meter is not None, "a meter runs"
        if torch.is_grad_enabled():
            self._again = Recompute(torch.zeros_like(visit.hidden))
            return self._again.at_experts(visit)
        visit.route_all()
        visit.forward(0, self.weights)
        self.choices = visit.choices
        self.waiting_bytes = self._meter.live_bytes, 0
        elements = sum(each.numel() for each in self.weights.values() if each.dim() == 3)
        self.more_flops = 2.0 * (visit.choices - 1) * len(visit.hidden) * elements
        return visit.output()

    def backward(self, out: Tensor, gradient: Tensor) -> None:
        """Take the recomputed block back through an expert."""
        assert self._meter is not None, "a meter runs"
        assert self._again is not None
        self._again.begin_backward((out,), (gradient,))
        visit = self._again.visit
        visit.route_all()
        visit.backward(0, self.weights)
        self.waiting_bytes, self.waiting_alone_bytes = (self.waiting_bytes[0], self._meter.live_bytes), visit.held_bytes
