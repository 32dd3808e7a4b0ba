"""The rules, one row for each, and which of them a run's options mean."""

from collections.abc import Callable
from typing import Any

from headrace.terms.errors import ConfigError
from headrace.terms.options.named import read_named
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.options.options import Options
from headrace.update.rules.adafactor import Adafactor, AdafactorRule
from headrace.update.rules.adalomo import AdaLomo, AdaLomoRule
from headrace.update.rules.adamw import AdamW, AdamWRule
from headrace.update.rules.lion import Lion, LionRule
from headrace.update.rules.lomo import Lomo, lomo_rule
from headrace.update.rules.muon import Muon, MuonRule
from headrace.update.rules.rule import UpdateRule
from headrace.update.rules.sgd import SGD, sgd_rule

RULES: dict[type[Optimizer], Callable[[Any, str], UpdateRule]] = {
    AdamW: AdamWRule,
    SGD: sgd_rule,
    Lion: LionRule,
    Lomo: lomo_rule,
    AdaLomo: AdaLomoRule,
    Adafactor: AdafactorRule,
    Muon: MuonRule,
}


def optimizer_of(options: Options) -> Optimizer:
    """Return the rule that `options` name, with its settings.

    Raises:
        ConfigError: there is no such rule, or it has no such setting or value; the message names those that it has.
    """
    return read_named(
        "optimizer",
        options.optimizer,
        RULES,
        lr=options.learning_rate,
        weight_decay=options.weight_decay,
        groups=options.parameter_groups,
        train=options.train,
    )


def rule_of(optimizer: Optimizer, compute_dtype: str) -> UpdateRule:
    """Return the rule that `optimizer` describes, for the planes of `compute_dtype`.

    Raises:
        ConfigError: no rule has these options.
    """
    if type(optimizer) not in RULES:
        known = ", ".join(kind.__name__ for kind in RULES)
        raise ConfigError(f"optimizer: {type(optimizer).__name__} is not one of the rules {known}; give one of them")
    return RULES[type(optimizer)](optimizer, compute_dtype)
