"""Which rule an optimizer's options mean: one row for each."""

from collections.abc import Callable
from typing import Any

from headrace.terms.errors import ConfigError
from headrace.terms.optimizer import SGD, AdamW, Optimizer
from headrace.terms.rule_figures import Grain
from headrace.update.rule import UpdateRule
from headrace.update.rules.adamw import AdamWRule
from headrace.update.rules.sgd import sgd_rule

_RULES: dict[type[Optimizer], Callable[[Any, str], UpdateRule]] = {
    AdamW: AdamWRule,
    SGD: sgd_rule,
}


def rule_of(optimizer: Optimizer, compute_dtype: str) -> UpdateRule:
    """Return the rule that `optimizer` means, for the planes of `compute_dtype`.

    Raises:
        ConfigError: no rule has these options, or one that the store cannot cut units for.
    """
    if type(optimizer) not in _RULES:
        known = ", ".join(kind.__name__ for kind in _RULES)
        raise ConfigError(f"optimizer: {type(optimizer).__name__} is none of the rules {known}; give one of them")
    rule = _RULES[type(optimizer)](optimizer, compute_dtype)
    if rule.figures.grain is not Grain.ELEMENT:
        raise ConfigError(
            f"optimizer: {rule.figures.name} updates whole {rule.figures.grain} pieces, and chunks are cut anywhere so far; "
            "take a rule whose grain is the element"
        )
    return rule
