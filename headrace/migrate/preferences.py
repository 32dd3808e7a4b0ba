"""Losses of preferences as other trainers name them: DPO with its kinds, ORPO, SimPO, KTO. A pair counts as two rows."""

from collections.abc import Mapping
from typing import Any

from headrace.migrate.source import MigratedFile, one_reason, refuse

_OF_DPO = ("sigmoid", "ipo", "hinge")
# What adds to the loss, or computes it otherwise, and the values with which it does not.
_OTHERS: Mapping[str, tuple[Any, ...]] = {
    "dpo_norm_loss": (0,),
    "dpo_use_weighting": (0,),
    "f_divergence_type": ("reverse_kl",),
    "ld_alpha": (1,),
    "loss_weights": ([], [1.0], 1.0),
    "pref_bco_weight": (0,),
    "pref_ftx": (0,),
    "reference_free": (0,),
    "rpo_alpha": (0,),
    "sync_ref_model": (0,),
    "use_weighting": (0,),
}
REASONS = {
    **one_reason("a pair is cut as a whole (docs/preferences.md)", "max_prompt_length truncation_mode"),
    **one_reason("the reference is the model that training begins with", "ref_adapter_name ref_model ref_model_*"),
    "discopop_tau": "only loss_type=discopop reads it, which is refused",
    "disable_dropout": "models are trained as their configuration has them; set its dropout to 0",
    "f_alpha_divergence_coef": "only f_divergence_type=alpha_divergence reads it, which is refused",
    "precompute_ref_*": "the reference is always computed before the first step",
    "model_adapter_name": "an adapter has no name here",
}


WEIGHTS = {"desirable_weight": "desirable_weight", "undesirable_weight": "undesirable_weight"}


def take_labels(source: MigratedFile, kind_key: str, beta_key: str, weights: Mapping[str, str]) -> None:
    """Take KTO. `weights` are the file's keys by ours.

    Raises:
        ConfigError: it is another loss of labelled completions, or something is added to it.
    """
    _refuse_others(source)
    if (kind := source.take(kind_key, "kto")) != "kto":
        raise refuse(kind_key, kind, "is not trained by this version; kto is")
    words = {"beta": float(source.take(beta_key, 0.1))}
    words |= {ours: float(source.take(theirs, 1.0)) for ours, theirs in weights.items()}
    source.set("loss", f"kto:{','.join(f'{key}={_plain(value)}' for key, value in words.items())}", beta_key)
    source.notes.append("tokens_per_step: each completion counts twice, once with another prompt; data have a label")


def take_preferences(source: MigratedFile, kind_key: str, beta_key: str, settings: Mapping[str, str]) -> None:
    """Take the loss of pairs that `kind_key` names: `sigmoid`, `ipo`, `hinge`, `orpo` or `simpo`.

    `settings` are the file's keys by ours.

    Raises:
        ConfigError: the loss is another one, or something is added to it.
    """
    _refuse_others(source)
    named = source.take(kind_key, "sigmoid")
    kind = str(named[0] if isinstance(named, list) and len(named) == 1 else named)
    kind = {"dpo": "sigmoid"}.get(kind, kind)
    if kind not in (*_OF_DPO, "orpo", "simpo"):
        raise refuse(kind_key, kind, "is not trained by this version; sigmoid, ipo, hinge, orpo and simpo are")
    words: dict[str, Any] = {"beta": float(source.take(beta_key, 0.1))}
    if kind in _OF_DPO:
        words["loss_type"] = kind
    for ours, theirs in settings.items():
        value = source.take(theirs)
        if value and (ours, kind) in (("label_smoothing", "sigmoid"), ("gamma", "simpo")):
            words[ours] = float(value)
        elif value:
            source.leave(theirs, f"{kind} has no {ours}")
    name = "dpo" if kind in _OF_DPO else kind
    source.set("loss", f"{name}:{','.join(f'{key}={_plain(value)}' for key, value in words.items())}", beta_key)
    source.notes.append("tokens_per_step: both completions of a pair count; data have prompt, chosen and rejected")


def _refuse_others(source: MigratedFile) -> None:
    for key, same in _OTHERS.items():
        value = source.take(key)
        if value is not None and value not in same:
            raise refuse(key, value, "changes the loss in a way that this version does not have")


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
