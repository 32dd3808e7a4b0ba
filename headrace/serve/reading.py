"""What a request asks: its body checked, its prompt as tokens, its lengths within those of the server.

Invariant: whatever bytes a client sends, the outcome is a request or an `Refused` with a status of 4xx.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.data.chat.api_bodies import settings_of
from headrace.data.chat.prompts import Prompts
from headrace.data.chat.request_keys import RENAMED, TEMPLATE_KEYS, check_keys, is_one_of
from headrace.serve.rendering import RENDER_SECONDS, in_time
from headrace.serve.shapes import EndpointShape
from headrace.serve.steering import STEERING_KEYS, TEXT_KEYS, Extras, extras_of
from headrace.serve.tools.asking import CHAT_KEYS, Asking
from headrace.serve.tools.speech import Speech
from headrace.terms.errors import HeadraceError, InputError, shortened

_STREAM = ("stream", "stream_options")
_SALT = "cache_salt"


class Refused(HeadraceError):
    """A request is refused with an HTTP `status`; `code` is OpenAI's word for the reason."""

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Limits:
    """Lengths in tokens: of a prompt, of prompt and answer together, and of an answer whose request names none."""

    prompt: int
    together: int
    new: int


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a request asks: answers to `prompts`, of which `texts` are the words. `seed` None: it names none. `speech` makes
    what takes an answer apart, None: the answer is text. What is kept of prompts is shared by those of one `salt`.
    """

    shape: EndpointShape
    prompts: tuple[tuple[int, ...], ...]
    settings: Mapping[str, Any]
    new_tokens: int
    seed: int | None
    streams: bool
    tells_usage: bool
    extras: Extras
    texts: tuple[str, ...] = ()
    speech: Callable[[], Speech] | None = field(default=None, compare=False)
    salt: str | None = None


@dataclass(frozen=True)
class RequestReader:
    """Reads the bodies of requests to the model called `name`. It is used by one thread at a time, as its tokenizer is."""

    name: str
    asking: Asking
    limits: Limits

    def read(self, shape: EndpointShape, content: bytes) -> GenerationRequest:
        """Return what the body `content` asks.

        Raises:
            Refused: it cannot be answered.
        """
        body = _object_of(content)
        model = body.get("model")
        if model is not None and model != self.name:
            raise Refused(f"model {shortened(repr(model))} is not here; this server has {self.name!r}", 404, "model_not_found")
        try:
            streams, tells_usage = _stream_of(body)
            extras = extras_of(body, is_chat=shape.is_chat)
            prompts, speech = self._chat_of(body) if shape.is_chat else (self._prompts_of(body), None)
            own = (*CHAT_KEYS, *TEMPLATE_KEYS) if shape.is_chat else TEXT_KEYS
            check_keys(body, (*_STREAM, _SALT, *STEERING_KEYS, *own))
            bounded = {key: value for key, value in body.items() if not (key in RENAMED and is_one_of(value, (-1,)))}
            scores_alone = extras.steering.prompt_top is not None and is_one_of(_most_tokens(body), (0,))
            settings = settings_of({key: each for key, each in bounded.items() if not (scores_alone and key in RENAMED)})
        except InputError as error:
            raise Refused(str(error)) from error
        new, seed = settings.pop("max_new_tokens", None), settings.pop("seed", None)
        longest = max(map(len, prompts))
        if len(bounded) < len(body) and new is None:  # -1: as many as there is room for
            new = max(0, self.limits.together - longest)
        count = 0 if scores_alone else self._new_tokens(longest, new)
        texts = tuple(map(self.text_of, prompts)) if extras.echo else ()
        salt = _salt_of(body)
        return GenerationRequest(shape, prompts, settings, count, seed, streams, tells_usage, extras, texts, speech, salt)

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, as they are."""
        return str(self.asking.prompts.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def _chat_of(self, body: Mapping[str, Any]) -> tuple[tuple[tuple[int, ...], ...], Callable[[], Speech] | None]:
        with in_time(RENDER_SECONDS):
            asked = self.asking.read(body)
        return (tuple(self.asking.prompts.of_rendered(asked.text)),), asked.speech

    def _prompts_of(self, body: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
        given = body.get("prompt")
        several = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
        return tuple(tuple(self._prompt_of(each)) for each in several)

    def _prompt_of(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return Prompts(self.asking.prompts.tokenizer, raw=True).of_text(prompt)
        if isinstance(prompt, list) and prompt and all(isinstance(each, int) and each is not True for each in prompt):
            return prompt
        raise Refused("prompt must be a text or a list of tokens, or a list of texts or of lists of tokens")

    def _new_tokens(self, prompt: int, asked: int | None) -> int:
        limits = self.limits
        if prompt > limits.prompt:
            raise Refused(
                f"the prompt has {prompt} tokens; this server takes {limits.prompt}, which --max-length sets",
                code="context_length_exceeded",
            )
        room = limits.together - prompt
        if asked is not None and asked > room:
            raise Refused(
                f"the prompt has {prompt} tokens and max_tokens is {asked}: more than the {limits.together} of this server "
                f"(--max-length); ask for {room} or fewer",
                code="context_length_exceeded",
            )
        return asked or min(limits.new, room)


def _most_tokens(body: Mapping[str, Any]) -> Any:
    return next((body[key] for key in RENAMED if body.get(key) is not None), None)


def _object_of(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content)
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeError as error:  # an escape such as \ud83d without its other half, in a key or in a value
        raise Refused("the body has half a character, or is not UTF-8; send whole ones") from error
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON ({error})") from error
    if not isinstance(body, dict):
        raise Refused(f"the body must be a JSON object, found {type(body).__name__}")
    return body


def _salt_of(body: Mapping[str, Any]) -> str | None:
    salt = body.get(_SALT)
    if salt is not None and not (isinstance(salt, str) and salt):
        raise Refused(f"{_SALT} must be a text that is not empty, found {shortened(repr(salt))}")
    return salt


def _stream_of(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether a request streams, and whether its stream ends with the numbers of tokens."""
    streams, options = body.get("stream") or False, body.get("stream_options") or {}
    if not isinstance(streams, bool) or not isinstance(options, dict):
        raise Refused("stream must be true or false, and stream_options an object")
    if any(value for key, value in options.items() if key != "include_usage"):
        raise Refused(f"stream_options may have include_usage alone, found {shortened(repr(options))}")
    return streams, bool(options.get("include_usage"))
