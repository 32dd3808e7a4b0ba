"""Bodies of requests as OpenAI's API has them, in lines of Batch files or sent to a server.

Invariant: each key of a body is an option of generation here, or has no effect, or is refused by name.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.data.chat.prompts import Prompts
from headrace.terms.errors import DataError, shortened
from headrace.terms.options.generate_options import GenerateOptions

# Settings that a request may give for its own generation, by the option's name.
SETTINGS = (*(each.key for each in GenerateOptions.declarations() if each.setting and each.setting.by_line), "seed")
# Keys that are options here by another name, and those that have no effect.
_RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
_WITHOUT_EFFECT = frozenset({"model", "messages", "user", "metadata", "store", "service_tier"})


def check_keys(body: Mapping[str, Any], more: Iterable[str] = ()) -> None:
    """Refuse keys that would change an answer in a way that is not supported. `more` are keys that the caller reads.

    Raises:
        DataError: there is one; the message names it.
    """
    known = {*_WITHOUT_EFFECT, *_RENAMED, *SETTINGS, *more}
    for key, value in body.items():
        if key not in known and not _is_off(key, value):
            raise DataError(f"{shortened(key)} is {shortened(repr(value))}, which is not supported; leave it out")


def settings_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a body sets of its generation: arguments of transformers' `generate`, and `seed`.

    Raises:
        ConfigError: a value is not understood.
    """
    renamed = {_RENAMED.get(key, key): value for key, value in body.items() if value is not None}
    options = GenerateOptions.of(given := {key: renamed[key] for key in SETTINGS if key in renamed})
    return {**options.settings, **({"seed": options.seed} if "seed" in given else {})}


def conversation_of(body: Mapping[str, Any], prompts: Prompts) -> list[int]:
    """Return the token ids of a body's `messages`, with its `tools`.

    Raises:
        InputError: they are no conversation, or the model's template refuses it.
    """
    messages = body.get("messages")
    are_objects = isinstance(messages, list) and all(isinstance(each, dict) for each in messages)
    if not messages or not are_objects or not all(isinstance(each.get("role"), str) for each in messages):
        raise DataError("messages must be a list of objects with role and content")
    return prompts.of_messages(messages, body.get("tools"))


def _is_off(key: str, value: Any) -> bool:
    """Return whether a key has a value that changes nothing."""
    return not value or (key == "n" and value == 1 and value is not True)
