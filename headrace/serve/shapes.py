"""The JSON of OpenAI's API: whole answers, the pieces of a streamed one, errors."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.generate.uses.answering import Answer

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EndpointShape:
    """How an endpoint answers: the names of its objects, and where text stands in a choice, whole or a piece."""

    prefix: str
    whole: str
    piece: str
    is_chat: bool

    def choice(self, text: str | None, reason: str | None, *, piece: bool) -> Json:
        """Return the one choice; `text` None: it has no more."""
        found: Json = {"index": 0, "logprobs": None, "finish_reason": reason}
        if not self.is_chat:
            return found | {"text": text or ""}
        if piece:
            return found | {"delta": {} if text is None else {"content": text}}
        return found | {"message": {"role": "assistant", "content": text}}


CHAT = EndpointShape("chatcmpl", "chat.completion", "chat.completion.chunk", is_chat=True)
TEXT = EndpointShape("cmpl", "text_completion", "text_completion", is_chat=False)


@dataclass(frozen=True, slots=True)
class Reply:
    """The JSON of one request's answer: all its objects have one id. `seed` is what it was drawn with."""

    shape: EndpointShape
    model: str
    seed: int
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answer: Answer) -> Json:
        """Return the answer."""
        choice = self.shape.choice(answer.text, answer.finish_reason, piece=False)
        return self._object(self.shape.whole, [choice]) | {"usage": usage_of(answer)}

    def begin(self) -> Json | None:
        """Return what comes before the first piece of text, if anything does."""
        if not self.shape.is_chat:
            return None
        choice = self.shape.choice(None, None, piece=True) | {"delta": {"role": "assistant", "content": ""}}
        return self._object(self.shape.piece, [choice])

    def piece(self, text: str) -> Json:
        """Return a piece of text."""
        return self._object(self.shape.piece, [self.shape.choice(text, None, piece=True)])

    def end(self, answer: Answer) -> Json:
        """Return what says why the answer ends."""
        return self._object(self.shape.piece, [self.shape.choice(None, answer.finish_reason, piece=True)])

    def usage(self, answer: Answer) -> Json:
        """Return the last object of a stream whose client asked for the numbers of tokens."""
        return self._object(self.shape.piece, []) | {"usage": usage_of(answer)}

    def _object(self, kind: str, choices: list[Json]) -> Json:
        names = {"id": f"{self.shape.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return names | {"choices": choices, "seed": self.seed}


def usage_of(answer: Answer) -> Json:
    """Return the numbers of tokens."""
    counts = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}


def error_of(message: str, kind: str, code: str | None = None) -> Json:
    """Return an error; half characters, which a client may have sent, are replaced."""
    message = message.encode("utf-8", "replace").decode()
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def model_entry(name: str, created: int, max_length: int) -> Mapping[str, Any]:
    """Return the entry of a model in the list of models."""
    return {"id": name, "object": "model", "created": created, "owned_by": "headrace", "max_model_len": max_length}
