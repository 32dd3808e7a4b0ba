"""Rules of updates in plain PyTorch, for those that torch has none of: written from their papers, parameter by parameter."""

from typing import Any

import torch


class PlainLion(torch.optim.Optimizer):
    """Lion, program 1 of Chen et al. 2023, with the momentum in float64."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), rate = group["betas"], group["lr"]
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p, dtype=torch.float64))
                gradient = p.grad.double()
                direction = torch.sign(beta1 * momentum + (1 - beta1) * gradient)
                momentum.mul_(beta2).add_((1 - beta2) * gradient)
                p.mul_(1 - rate * group["weight_decay"]).sub_(rate * direction.float())
