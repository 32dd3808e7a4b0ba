"""Every setting of a generation is computed as transformers computes it, or refused by name before any work.

`KEYS` has each key of transformers' GenerationConfig, with the values that are computed; `KEYWORDS` has those of `generate`
besides. What their values do together is found by trying: transformers' own code makes the processors of scores, and they
process some. Invariant: what passes here does not fail in a seat because of a setting.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
from transformers import GenerationConfig
from transformers.generation import GenerationMode

from headrace.terms.errors import ConfigError, in_one_line

# Tokens of the prompt with which settings are tried, and new tokens.
_PROMPT, _TRIED_TOKENS = 1, 4
_TOKENIZERS = ("tokenizer", "assistant_tokenizer")
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Values:
    """Values of a key that are computed: those for which `takes` is true, called `name`."""

    name: str
    takes: Callable[[Any], bool]


def _is_whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _are_tokens(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() and value.dtype != torch.bool and value.dim() <= 1
    return all(map(_is_token, value)) if isinstance(value, list | tuple) else _is_token(value)


def _is_token(value: Any) -> bool:
    return _is_whole(value, -(1 << 62)) and int(value) < 1 << 62


def _are_texts(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list | tuple) and all(isinstance(text, str) and text and _is_whole_text(text) for text in texts)


def _is_whole_text(text: str) -> bool:
    """Return whether no character is a half, which no UTF-8 can write."""
    return not any("\ud800" <= each <= "\udfff" for each in text)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value))


def _only(*values: Any) -> Values:
    """No value but these, which change nothing."""
    return Values("nothing else than " + " or ".join(map(repr, values)), lambda value: _is_one_of(value, values))


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    return any(type(value) is type(each) and value == each for each in values) or (
        _is_number(value) and any(_is_number(each) and value == each for each in values)
    )


_FLAG = Values("true or false", lambda value: isinstance(value, bool))
_WHOLE = Values("a whole number", _is_whole)
_SOME = Values("a whole number from 1", lambda value: _is_whole(value, 1))
_NUMBER = Values("a number", _is_number)
_TOKENS = Values("a token or a list of tokens", _are_tokens)
_TRIED = Values("what transformers takes", lambda value: True)
_NOT = _only(None, False, 0, "", [], {})
# What steers how transformers computes, without a trace in what is computed here.
_NO_EFFECT = Values("anything", lambda value: True)

KEYS: Mapping[str, Values] = {
    **dict.fromkeys(("max_length", "max_new_tokens", "num_beams", "num_return_sequences", "prefill_chunk_size"), _SOME),
    **dict.fromkeys(("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens"), _SOME),
    **dict.fromkeys(("min_length", "min_new_tokens", "top_k"), _WHOLE),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), _WHOLE),
    **dict.fromkeys(("max_time", "temperature", "top_p", "min_p", "top_h", "typical_p"), _NUMBER),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "length_penalty", "assistant_confidence_threshold"), _NUMBER),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), _NUMBER),
    **dict.fromkeys(("do_sample", "renormalize_logits", "remove_invalid_values"), _FLAG),
    **dict.fromkeys(("output_scores", "output_logits", "return_dict_in_generate"), _FLAG),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "forced_bos_token_id"), Values("a token", _is_token)),
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"), _TOKENS),
    **dict.fromkeys(("bad_words_ids", "sequence_bias", "watermarking_config"), _TRIED),
    "exponential_decay_length_penalty": Values("a start and a factor", _is_pair),
    "early_stopping": Values('true, false or "never"', lambda value: isinstance(value, bool) or value == "never"),
    "stop_strings": Values("a text or a list of texts", _are_texts),
    "num_assistant_tokens_schedule": Values("a text", lambda value: isinstance(value, str)),
    "use_cache": _only(True),
    # Each of these would give the answers of a cache that grows, and transformers itself no longer reads "hybrid".
    "cache_implementation": _only("dynamic", "hybrid"),
    # Each of these is another way of generating, or needs what lies within blocks.
    **dict.fromkeys(("output_attentions", "output_hidden_states", "token_healing", "is_assistant", "use_mtp"), _NOT),
    **dict.fromkeys(("assistant_early_exit", "assistant_ensemble_weight", "speculation_type"), _NOT),
    **dict.fromkeys(("cache_config", "compile_config", "continuous_batching_config", "low_memory"), _NOT),
    **dict.fromkeys(("constraints", "force_words_ids", "dola_layers"), _NOT),
    "guidance_scale": _only(1),
    # Whether they count depends on the others: `_mode` refuses what they ask for.
    **dict.fromkeys(("penalty_alpha", "diversity_penalty"), _NUMBER),
    "num_beam_groups": _SOME,
    **dict.fromkeys(("max_cache_len", "disable_compile", "decoder_start_token_id"), _NO_EFFECT),
    **dict.fromkeys(("assistant_lookbehind", "target_lookbehind"), _WHOLE),
    "transformers_version": _NO_EFFECT,
}

# Keywords of `generate` that are none of its configuration, each handed on to it.
KEYWORDS = frozenset(
    ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "assistant_model", "streamer", *_TOKENIZERS)
)
_ELSEWHERE = {
    GenerationMode.CONTRASTIVE_SEARCH: "penalty_alpha",
    GenerationMode.GROUP_BEAM_SEARCH: "num_beam_groups",
    GenerationMode.CONSTRAINED_BEAM_SEARCH: "constraints",
    GenerationMode.DOLA_GENERATION: "dola_layers",
}


class SettingError(ConfigError):
    """A setting cannot be computed; `key` is its name."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(f"{key} {why}")
        self.key = key


def check_file(values: Mapping[str, Any]) -> None:
    """Check the keys of a generation_config.json. An unknown key passes if its value is null, false or empty.

    Raises:
        SettingError: a key or its value is refused.
    """
    for key, value in values.items():
        # Training turns caches off and leaves that in the file: answers are the same with one.
        if not key.startswith("_") and not (key == "use_cache" and isinstance(value, bool)):
            _check_key(key, value)
    _attempt(values, lambda some: GenerationConfig(**copy.deepcopy(dict(some))))


def resolved(model_own: Any, given: Any, changes: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the configuration that transformers computes with, and the other keywords of `generate`.

    As there, a key without a value in `given` takes the model's own, and `changes` win over both. None among them switches a
    key off, and stays None. `max_length` has no default.

    Raises:
        ConfigError: a key, a keyword or a value is refused, by name.
    """
    if given is not None and not isinstance(given, GenerationConfig):
        raise ConfigError(f"generation_config: expected a GenerationConfig of transformers, found {type(given).__name__}")
    asked = {key: value for key, value in vars(given or GenerationConfig()).items() if value is not None and key[0] != "_"}
    asked |= {key: value for key, value in changes.items() if key not in KEYWORDS}
    for key, value in asked.items():
        _check_key(key, value)
    asked = {key: value for key, value in asked.items() if key in KEYS}

    def made(some: Mapping[str, Any]) -> Any:
        config = copy.deepcopy(model_own)
        config.update(**{"use_cache": True, **some})
        filled = {key: value for key, value in _defaults().items() if getattr(config, key, None) is None}
        config.update(**{key: value for key, value in filled.items() if key not in asked})
        return config

    rest = {key: changes[key] for key in KEYWORDS if changes.get(key) is not None}
    return _attempt(asked, made), rest


def switched_off(config: Any) -> dict[str, None]:
    """Return the keys that are None, for which transformers would put a value of its own."""
    return {key: None for key, value in _defaults().items() if value is not None and getattr(config, key, None) is None}


def is_assisted(settings: Mapping[str, Any]) -> bool:
    """Return whether tokens are drafted: transformers then takes one row at a time."""
    mode = settings["generation_config"].get_generation_mode(settings.get("assistant_model"))
    return bool(mode == GenerationMode.ASSISTED_GENERATION)


def check_call(settings: Mapping[str, Any], rows: int) -> None:
    """Refuse what a call of `generate` for so many rows would refuse, or compute otherwise, though each value is right.

    Raises:
        ConfigError: the message names the setting.
    """
    config = settings["generation_config"]
    for key in ("output_attentions", "output_hidden_states"):
        if getattr(config, key, None):
            raise ConfigError(f"{key}: they lie within blocks, which are run elsewhere; leave it out")
    if config.stop_strings and settings.get("tokenizer") is None:
        raise ConfigError("stop_strings: transformers needs the tokenizer to find texts; give tokenizer=..., too")
    if settings.get("streamer") is not None and rows > 1:
        raise ConfigError(f"streamer: takes one prompt, {rows} were given; leave it out")


def try_generation_settings(model: Any, config: Any, rest: Mapping[str, Any], vocabulary: int) -> None:
    """Try what the values of a resolved configuration do together, on scores of `vocabulary` tokens, without the model's
    weights.

    Raises:
        SettingError: they cannot be computed.
    """
    plain = {**vars(GenerationConfig()), **_defaults()}
    set_here = {key: value for key in KEYS if (value := getattr(config, key, None)) not in (None, plain.get(key))}

    def tried(some: Mapping[str, Any]) -> None:
        without = copy.deepcopy(config)
        for key in set_here.keys() - some.keys():
            setattr(without, key, plain.get(key))
        _try(model, without, rest, vocabulary)

    _attempt(set_here, tried)


def _try(model: Any, config: Any, rest: Mapping[str, Any], vocabulary: int) -> None:
    mode = config.get_generation_mode(rest.get("assistant_model"))
    if mode in _ELSEWHERE:
        raise ValueError(f"{_ELSEWHERE[mode]} asks for {mode.value.replace('_', ' ')}, for which transformers has no code")
    given = {key: value for key, value in rest.items() if key in ("assistant_model", "streamer", *_TOKENIZERS)}
    model._validate_generation_mode(mode, config, given)
    config.max_length = _PROMPT + min(_TRIED_TOKENS, config.max_new_tokens or _TRIED_TOKENS)
    model._prepare_special_tokens(config, True, device="cpu", batch_size=1)
    ids = torch.zeros((1, _PROMPT), dtype=torch.int64)
    mask = {"attention_mask": torch.ones_like(ids)}
    processors = model._get_logits_processor(
        generation_config=config, input_ids_seq_length=_PROMPT, encoder_input_ids=ids, device="cpu", model_kwargs=mask
    )
    for length in range(_PROMPT, config.max_length):
        scores = processors(ids.expand(1, length), torch.linspace(-10, 10, vocabulary, dtype=torch.float32)[None])
        if config.do_sample and not torch.softmax(scores, dim=-1).isfinite().all():
            raise ValueError("no token is left, or scores are too large, to sample from")
    ends = config._eos_token_tensor
    if config.num_beams > 1 and max(2, 1 + (0 if ends is None else len(ends))) > vocabulary:
        raise ValueError(f"num_beams needs more tokens than the {vocabulary} of the model")


def _check_key(key: str, value: Any) -> None:
    """Check one key of a configuration, whatever the others are."""
    if key not in KEYS:
        if not _NOT.takes(value):
            raise SettingError(key, f"is {value!r}: no setting of that name is known here; leave it out")
    elif value is not None and not KEYS[key].takes(value):
        raise SettingError(key, f"is {value!r}; expected {KEYS[key].name}. Correct it, or leave it out")


def _attempt(values: Mapping[str, Any], make: Callable[[Mapping[str, Any]], _Made]) -> _Made:
    """Return what `make` makes of `values`; where it raises, find the key without which it does not."""
    try:
        return make(values)
    except Exception as error:  # whatever transformers raises for impossible values
        why = in_one_line(error)
        found = [key for key in values if _passes(make, {name: value for name, value in values.items() if name != key})]
        found.sort(key="do_sample".__eq__)  # without sampling, hardly anything is wrong
        named = [key for key in found or values if key in why] or found or ["generation_config"]
        raise SettingError(named[0], f"is {values.get(named[0])!r}: {why}. Correct it, or leave it out") from error


def _passes(make: Callable[[Mapping[str, Any]], object], values: Mapping[str, Any]) -> bool:
    try:
        make(values)
    except Exception:
        return False
    return True


def _defaults() -> dict[str, Any]:
    """The defaults of transformers, except for the length, which has another default here."""
    found = GenerationConfig._get_default_generation_params()
    return {key: value for key, value in found.items() if key != "max_length"}
