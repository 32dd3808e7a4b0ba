"""Rules of updates in plain PyTorch, for those that torch has none of: written from their papers, parameter by parameter."""

from typing import Any

import torch


class PlainLomo(torch.optim.Optimizer):
    """LOMO's update (Lv et al. 2023, with the decay of its authors' code), in float64."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(p.double() * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * p.grad.double())


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


class PlainAdaLomo(torch.optim.Optimizer):
    """AdaLomo as its paper and its authors' code have it, in float64; of a stack of matrices each is one by itself."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        keep = 1 - self.count**-0.8
        for group in self.param_groups:
            for p in group["params"]:
                whole, gradient = p.double(), p.grad.double()
                axes = (-2, -1) if p.dim() >= 2 else (-1,)
                squares = gradient.square() + 1e-30
                if p.dim() >= 2:
                    rows, columns = squares.mean(-1, keepdim=True), squares.mean(-2, keepdim=True)
                    r = self.state[p]["r"] = keep * self.state[p].get("r", 0) + (1 - keep) * rows
                    c = self.state[p]["c"] = keep * self.state[p].get("c", 0) + (1 - keep) * columns
                    moment = r * c / r.mean(-2, keepdim=True)
                else:
                    moment = self.state[p]["v"] = keep * self.state[p].get("v", 0) + (1 - keep) * squares
                update = gradient / moment.sqrt()
                update = update / update.square().mean(axes, keepdim=True).sqrt().clamp(min=1.0)
                rate = group["lr"] * whole.square().mean(axes, keepdim=True).sqrt().clamp(min=1e-3)
                p.copy_(whole * (1 - rate * group["weight_decay"]) - rate * update)


class PlainMuon:
    """`torch.optim.Muon` for matrices but the first of them, an embedding, and `torch.optim.AdamW` for it and all else."""

    def __init__(self, groups: Any, lr: float) -> None:
        (embedding, *hidden), rest, decay = groups[0]["params"], groups[1]["params"], groups[0]["weight_decay"]
        others = [{"params": [embedding], "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]
        self.parts = [
            torch.optim.Muon(hidden, lr=lr, weight_decay=decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), eps=1e-8),
        ]

    def zero_grad(self) -> None:
        for each in self.parts:
            each.zero_grad()

    def step(self) -> None:
        for each in self.parts:
            each.step()
