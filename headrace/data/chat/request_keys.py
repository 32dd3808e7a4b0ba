"""What each key of a request does: OpenAI's keys, and those by which other servers extend that API.

Invariant: a key is computed, has a value that changes nothing, or is refused by name. In lines of prompts, others are columns.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.terms.errors import DataError, shortened
from headrace.terms.options.generate_options import GenerateOptions

# Settings that a request may give for its own generation, by the option's name.
SETTINGS = (*(each.key for each in GenerateOptions.declarations() if each.setting and each.setting.by_line), "seed")
# Keys that are options here by another name.
RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
# What chat templates are given: an object of variables, or one of them.
TEMPLATE_KEYS = ("chat_template_kwargs", "enable_thinking", "reasoning_effort")
# Keys that no value of changes an answer.
WITHOUT_EFFECT = frozenset(
    ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
) | {"request_id", "priority", "cache_salt", "cache_prompt", "timings_per_token"}
# Values with which a setting of transformers' GenerationConfig is off, whatever the model's own generation_config.json says.
OFF: Mapping[str, tuple[Any, ...]] = {
    "top_k": (-1, 0),
    "min_p": (0,),
    "typical_p": (1,),
    "repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "min_new_tokens": (0,),
    "min_length": (0,),
}
# Values with which a key asks for what is done anyway. None always does.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **OFF,
    "seed": (-1,),  # what llama.cpp and others call a seed of the server's own
    # How many answers, and what stands beside their text.
    "n": (1,),
    "best_of": (1,),
    "num_return_sequences": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (False,),
    "echo": (False,),
    "suffix": ("",),
    "stream": (False,),
    "stream_options": ({},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    # Which tokens are taken.
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repeat_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "stop_token_ids": ([],),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "do_sample": (),
    "num_beams": (1,),
    "max_length": (),
    # Which form an answer has.
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "detokenize": (True,),
    "verbosity": ("medium",),
    "reasoning_effort": (),
    # What the prompt is made of.
    "tool_choice": ("auto", "none"),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": ("",),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "enable_thinking": (),
    "system": ("",),
    "raw": (False,),
}
_INSTEAD = {
    "system": "give a message with role system, or --system",
    "raw": "give --raw",
    "prompt": "a conversation is answered from its messages",
    "messages": "a text is continued from its prompt",
    "tools": "tools stand beside messages",
}


def check_keys(body: Mapping[str, Any], read: Iterable[str], *, has_columns: bool = False) -> None:
    """Refuse keys that would change an answer in a way that is not supported. `read` are keys that the caller reads.

    `has_columns`: keys that no API knows are columns, and pass.

    Raises:
        DataError: there is one; the message names it.
    """
    computed = {*WITHOUT_EFFECT, *RENAMED, *SETTINGS, *read}
    for key, value in body.items():
        if key in computed or value is None or is_one_of(value, _neutral(key, body)):
            continue
        if key in NEUTRAL or key in _BY_OTHERS or (value and (key in _INSTEAD or not has_columns)):
            raise DataError(
                f"{shortened(key)} is {shortened(repr(value))}, which is not supported; {_INSTEAD.get(key, 'leave it out')}"
            )


def is_one_of(value: Any, values: Iterable[Any]) -> bool:
    """Return whether `value` is one of `values`; true is no 1 here, and 1.0 is."""
    return any(each == value and (type(each) is type(value) or (_is_number(each) and _is_number(value))) for each in values)


# Keys whose neutral value follows from others.
_BY_OTHERS = ("parallel_tool_calls", "add_special_tokens")


def _neutral(key: str, body: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values with which `key` changes nothing in `body`."""
    if key == "parallel_tool_calls":
        return (True,) if body.get("tools") else (True, False)
    if key == "add_special_tokens":  # a template writes them; a text gets them
        return ("messages" not in body,)
    return NEUTRAL.get(key, ())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
