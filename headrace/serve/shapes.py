"""The JSON of OpenAI's API: whole answers, the pieces of a streamed one, errors."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.generate.uses.answering import STOP, Answer
from headrace.serve.tools.dialect import Json
from headrace.serve.tools.speech import Speech, message_of


@dataclass(frozen=True, slots=True)
class EndpointShape:
    """How an endpoint answers: the names of its objects, and whether it speaks in messages."""

    prefix: str
    whole: str
    piece: str
    is_chat: bool


CHAT = EndpointShape("chatcmpl", "chat.completion", "chat.completion.chunk", is_chat=True)
TEXT = EndpointShape("cmpl", "text_completion", "text_completion", is_chat=False)


@dataclass(frozen=True, slots=True)
class Reply:
    """The JSON of one request's answer: all its objects have one id. `seed` is what it was drawn with. `speech` takes the
    answer apart, None: it is text.
    """

    shape: EndpointShape
    model: str
    seed: int
    speech: Speech | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answer: Answer) -> Json:
        """Return the answer."""
        said: Json = {"text": answer.text}
        if self.shape.is_chat:
            said = {"message": message_of([*self._deltas(answer.text), *self._rest()])}
        return self._object(self.shape.whole, said, self._reason(answer)) | {"usage": usage_of(answer)}

    def begin(self) -> Json | None:
        """Return what comes before the first piece of text, if anything does."""
        if not self.shape.is_chat:
            return None
        return self._object(self.shape.piece, {"delta": {"role": "assistant", "content": ""}})

    def pieces(self, text: str) -> list[Json]:
        """Return what a piece of text becomes."""
        if not self.shape.is_chat:
            return [self._object(self.shape.piece, {"text": text})]
        return [self._object(self.shape.piece, {"delta": each}) for each in self._deltas(text)]

    def end(self, answer: Answer) -> list[Json]:
        """Return what is left of the answer, and what says why it ends."""
        left = [self._object(self.shape.piece, {"delta": each}) for each in self._rest()]
        nothing: Json = {"delta": {}} if self.shape.is_chat else {"text": ""}
        return [*left, self._object(self.shape.piece, nothing, self._reason(answer))]

    def usage(self, answer: Answer) -> Json:
        """Return the last object of a stream whose client asked for the numbers of tokens."""
        return self._object(self.shape.piece, None) | {"usage": usage_of(answer)}

    def _deltas(self, text: str) -> list[Json]:
        return [{"content": text}] if self.speech is None else self.speech.feed(text)

    def _rest(self) -> list[Json]:
        return [] if self.speech is None else self.speech.end()

    def _reason(self, answer: Answer) -> str:
        is_called = self.speech is not None and self.speech.calls and answer.finish_reason == STOP
        return "tool_calls" if is_called else answer.finish_reason

    def _object(self, kind: str, said: Json | None, reason: str | None = None) -> Json:
        names = {"id": f"{self.shape.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        choice: Json = {"index": 0, "logprobs": None, "finish_reason": reason}
        return names | {"choices": [] if said is None else [choice | said], "seed": self.seed}


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
