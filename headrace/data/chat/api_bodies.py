"""Bodies of requests as OpenAI's API has them, in lines of Batch files or sent to a server.

Invariant: each key of a body is an option of generation here, or has no effect, or is refused by name.
"""

from collections.abc import Mapping
from typing import Any

from headrace.data.chat.prompts import Prompts
from headrace.data.chat.request_keys import NEUTRAL, OFF, RENAMED, SETTINGS, TEMPLATE_KEYS, is_one_of
from headrace.terms.errors import DataError, shortened
from headrace.terms.options.generate_options import GenerateOptions


def settings_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a body sets of its generation: arguments of transformers' `generate`, and `seed`. None switches one off.

    Raises:
        ConfigError: a value is not understood.
        DataError: an option has two values, by two names.
    """
    given: dict[str, Any] = {}
    for key in (*SETTINGS, *RENAMED):
        value, option = body.get(key), RENAMED.get(key, key)
        if value is None or is_one_of(value, NEUTRAL.get(key, ())):
            continue
        if given.setdefault(option, value) != value:
            raise DataError(f"{key} is {value!r}, but {option} is {given[option]!r} by another name; leave one of them out")
    options = GenerateOptions.of(given)
    off = {key: None for key, values in OFF.items() if is_one_of(body.get(key), values)}
    return {**off, **options.settings, **({"seed": options.seed} if "seed" in given else {})}


def conversation_of(body: Mapping[str, Any], prompts: Prompts) -> list[int]:
    """Return the token ids of a body's `messages`, with its `tools`.

    Raises:
        InputError: they are no conversation, or the model's template refuses it.
    """
    return prompts.of_messages(messages_of(body), body.get("tools"), options=template_options_of(body))


def messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a body's messages, with `system` for its newer name `developer`.

    Raises:
        DataError: they are no conversation.
    """
    messages = body.get("messages")
    are_objects = isinstance(messages, list) and all(isinstance(each, dict) for each in messages)
    if not messages or not are_objects or not all(isinstance(each.get("role"), str) for each in messages):
        raise DataError("messages must be a list of objects with role and content")
    return [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]


def template_options_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that a body sets for the chat template.

    Raises:
        DataError: they are no object.
    """
    options = body.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise DataError(f"chat_template_kwargs must be an object, found {shortened(repr(options))}")
    return {**options, **{key: body[key] for key in TEMPLATE_KEYS[1:] if body.get(key) is not None}}
