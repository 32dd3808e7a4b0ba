"""From the optimizer and the schedule that a Trainer makes to the engine's options.

Invariant: an optimizer is taken only if the engine's update is the same one; any other is refused by name.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from headrace.terms.errors import ConfigError
from headrace.terms.options.named import named_text
from headrace.terms.options.optimizer import ParameterGroup, Schedule

# Schedules that have the same curve here; others are computed by transformers and handed to each step.
_KINDS = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}


def schedule_of(args: Any, steps: int) -> Schedule | None:
    """Return the engine's own schedule if it has the one of `args`; None if not."""
    name = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if name not in _KINDS or args.lr_scheduler_kwargs:
        return None
    return Schedule(_KINDS[name], 0 if name == "constant" else args.get_warmup_steps(steps), steps)


def options_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return the engine's options for what `optimizer` does with the parameters of `model`, which are on the meta device.

    Rates are in proportion to that of the first group.

    Raises:
        ConfigError: the engine has no such rule, or a group has another setting.
    """
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate's has the one that was made
    rate = inner.param_groups[0].get("initial_lr", inner.param_groups[0]["lr"])
    texts = {_rule_of(type(inner), group) for group in inner.param_groups if group["params"]}
    if len(texts) != 1:
        raise ConfigError(f"optimizer: its groups differ in more than weight_decay and lr ({' and '.join(sorted(texts))})")
    asked = _asked_of(inner, model, rate)
    usual = max((decay for _, decay in asked.values()), default=0.0)
    groups = tuple(_groups(asked)) if set(asked.values()) != {(1.0, usual)} else ()
    if groups and hasattr(model, "peft_config"):
        raise ConfigError("optimizer: all adapters have one weight_decay and one rate; give no groups of their own")
    return {"optimizer": texts.pop(), "learning_rate": rate, "weight_decay": usual, "parameter_groups": groups}


def _rule_of(kind: type, group: Mapping[str, Any]) -> str:
    if group.get("amsgrad") or group.get("maximize") or group.get("dampening"):
        raise ConfigError("optimizer: amsgrad, maximize and dampening are not done by the engine; leave them out")
    if kind is torch.optim.AdamW:
        beta1, beta2 = group["betas"]
        return named_text("adamw", {"beta1": repr(beta1), "beta2": repr(beta2), "eps": repr(group["eps"])})
    if kind is torch.optim.SGD:
        ahead = {"nesterov": "true"} if group["nesterov"] else {}
        return named_text("sgd", {"momentum": repr(group["momentum"]), **ahead})
    raise ConfigError(
        f"optim: the engine has no {kind.__module__}.{kind.__qualname__} with the same numbers; use adamw_torch or sgd. Other "
        "rules are options of `headrace train --optimizer`"
    )


def _asked_of(optimizer: torch.optim.Optimizer, model: nn.Module, rate: float) -> dict[str, tuple[float, float]]:
    """Return factor of the rate and decay of each parameter by its name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for group in optimizer.param_groups:
        own = group.get("initial_lr", group["lr"])
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigError("optimizer: it has a parameter that is not the model's; make it of trainer.model's")
            found[names[id(parameter)]] = (1.0 if own == rate else own / rate if rate else 1.0, group["weight_decay"])
    left = sorted(name for name, parameter in model.named_parameters() if parameter.requires_grad and name not in found)
    if left:
        raise ConfigError(f"optimizer: {len(left)} parameters are in no group, such as {left[0]}; freezing some is not done")
    return found


def _groups(asked: Mapping[str, tuple[float, float]]) -> Iterator[ParameterGroup]:
    """Yield a group for each rate and decay that is asked for: patterns of names without the numbers of blocks."""
    for wanted in sorted(set(asked.values())):
        names = {name for name, each in asked.items() if each == wanted}
        patterns = {re.sub(r"(\\\.)\d+(?=\\\.)", r"\1[0-9]+", re.escape(name)) for name in names}
        if any(re.fullmatch("|".join(patterns), name) for name in asked.keys() - names):
            patterns = {re.escape(name) for name in names}
        scale, decay = wanted
        yield ParameterGroup(pattern=f"^({'|'.join(sorted(patterns))})$", weight_decay=decay, learning_rate_scale=scale)
