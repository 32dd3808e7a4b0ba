"""Which part a mixture's router has in the loss: whether it is trained to load experts evenly, and by which coefficient.

transformers' models add their own auxiliary loss where their configuration has `output_router_logits` on. TRL's trainers of
texts, DPO, KTO and GRPO add it wherever a coefficient is there. Invariant: the configuration says all of it, so a trial, a plan
and a step see the same loss.
"""

import copy
from typing import Any

from headrace.losses.table import loss_of
from headrace.model import Chain
from headrace.terms.errors import ConfigError
from headrace.terms.options.method_options import OF_MODEL, MethodOptions

SWITCH, COEFFICIENT = "output_router_logits", "router_aux_loss_coef"
TRAINED, PLUS = "trained is the loss of", " plus"  # how the note begins, and what it has where the router has a part


def coefficient_of(config: Any) -> float:
    """Return the coefficient of the router's loss as TRL reads it; 0 where a configuration has none."""
    text = config.get_text_config()
    return float(getattr(text, COEFFICIENT, None) or 0.0) if hasattr(text, SWITCH) else 0.0


def with_router_loss(config: Any, options: MethodOptions) -> Any:
    """Return the configuration of a model whose own loss has the part of the router that a run under `options` trains.

    Raises:
        ConfigError: a coefficient is asked for, and the configuration has none.
    """
    asked, loss = options.router_aux_loss_coef, loss_of(options.loss)
    if asked is None:
        asked = OF_MODEL if loss is not None and loss.adds_router_loss else None
    is_on = bool(getattr(config, SWITCH, False))
    if asked is None or (asked == OF_MODEL and (is_on or not coefficient_of(config))):
        return config
    if asked == 0 and not is_on:
        return config
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if isinstance(asked, float) and asked:
        names = _coefficients(text)
        if not names or not hasattr(text, SWITCH):
            raise _has_none(config, asked)
        for name in names:
            setattr(text, name, asked)
    for each in (config, text):
        setattr(each, SWITCH, asked != 0)
    return config


def note_router_loss(chain: Chain, options: MethodOptions) -> None:
    """Let the notes of `chain` say whether its router has a part in the loss. Other models than mixtures get no note.

    Raises:
        ConfigError: a coefficient is asked for, and the model adds no such loss.
    """
    asked, loss, text = options.router_aux_loss_coef, loss_of(options.loss), chain.config.get_text_config()
    if isinstance(asked, float) and asked and not chain.collects_asides:
        raise _has_none(chain.config, asked)
    names = _coefficients(text)
    words = f"{TRAINED} {'tokens' if loss is None else loss.name}"
    if chain.collects_asides:
        times = f"{getattr(text, names[0]):g} times " if names else ""
        chain.notes += (f"{words}{PLUS} {times}the router's; {COEFFICIENT} 0 leaves that out",)
    elif names and hasattr(text, SWITCH):
        why = f": {SWITCH} is off; {COEFFICIENT} {OF_MODEL} adds it" if asked is None else ""
        chain.notes += (f"{words}, without the router's{why}",)


def _coefficients(text: Any) -> list[str]:
    return [name for name in vars(text) if name.endswith("aux_loss_coef")]


def _has_none(config: Any, asked: float) -> ConfigError:
    return ConfigError(
        f"{COEFFICIENT}: {asked:g} was asked for, but {type(config).__name__} adds no router's loss; leave it out"
    )
