"""The JSON of OpenAI's API: whole answers, the pieces of a streamed one, errors."""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.generate.uses.answering import STOP, Answer
from headrace.serve.desk import Request
from headrace.serve.logprobs import Words, of_chat, of_prompt, of_text
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


@dataclass(slots=True)
class AnswerChoice:
    """One of a reply's answers: what becomes of the text of `request`. `speech` takes it apart, None: it is text, behind what
    is echoed. `words` makes the text of a token.
    """

    shape: EndpointShape
    index: int
    request: Request
    words: Words
    speech: Speech | None = None
    echoed: str = ""
    scored: int = 0  # tokens whose log-probabilities have been sent

    def whole(self, answer: Answer) -> Json:
        """Return the answer."""
        scores, shown = self._logprobs(answer), {"text": self.echoed + answer.text}
        if self.shape.is_chat:
            return self._choice({"message": message_of([*self._deltas(answer.text), *self._rest()])}, scores, answer)
        return self._choice(shown, scores, answer) | self.of_prompt

    def begin(self) -> list[Json]:
        """Return what comes before the first piece of text."""
        if self.shape.is_chat:
            return [self._choice({"delta": {"role": "assistant", "content": ""}})]
        return [self._choice({"text": self.echoed}, self._logprobs())] if self.echoed else []

    def pieces(self, text: str) -> list[Json]:
        """Return what a piece of text becomes; the first that comes of it has the log-probabilities."""
        said: list[Json] = [{"delta": each} for each in self._deltas(text)] if self.shape.is_chat else [{"text": text}]
        return [self._choice(each, None if place else self._logprobs()) for place, each in enumerate(said)]

    def end(self, answer: Answer) -> list[Json]:
        """Return what is left of the answer, and what says why it ends."""
        nothing: Json = {"delta": {}} if self.shape.is_chat else {"text": ""}
        left = [self._choice({"delta": each}) for each in self._rest()]
        return [*left, self._choice(nothing, self._logprobs(answer), answer)]

    @property
    def of_prompt(self) -> Json:
        """The log-probabilities of the prompt, if the request asks for them without an echo."""
        scores, steering = self.request.scores, self.request.steering
        if scores is None or steering.prompt_top is None or (self.echoed and steering.top is not None):
            return {}
        return {"prompt_logprobs": of_prompt(scores.prompt, self.words)}

    def _deltas(self, text: str) -> list[Json]:
        return [{"content": text}] if self.speech is None else self.speech.feed(text)

    def _rest(self) -> list[Json]:
        return [] if self.speech is None else self.speech.end()

    def _logprobs(self, answer: Answer | None = None) -> Json | None:
        """Return the log-probabilities that have not been sent, up to the end of `answer`."""
        scores, top = self.request.scores, self.request.steering.top
        if scores is None or top is None:
            return None
        known = [
            *(scores.prompt if self.echoed else ()),
            *scores.tokens[: None if answer is None else answer.completion_tokens],
        ]
        found, before = known[self.scored :], known[: self.scored]
        self.scored = len(known)
        if self.shape.is_chat:
            return of_chat(found, self.words) if found else None
        return of_text(found, self.words, sum(len(self.words(each.token)) for each in before))

    def _choice(self, said: Json, logprobs: Json | None = None, answer: Answer | None = None) -> Json:
        reason = None if answer is None else answer.finish_reason
        if self.speech is not None and self.speech.calls and reason == STOP:
            reason = "tool_calls"
        return {"index": self.index, "logprobs": logprobs, "finish_reason": reason, **said}


@dataclass(frozen=True, slots=True)
class Reply:
    """The JSON of one request's answers: all its objects have one id. `seed` is what they were drawn with."""

    shape: EndpointShape
    model: str
    seed: int
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: list[Json], usage: Json) -> Json:
        """Return whole answers."""
        return self._object(self.shape.whole, choices) | {"usage": usage}

    def piece(self, choice: Json) -> Json:
        """Return a piece of one answer."""
        return self._object(self.shape.piece, [choice])

    def usage(self, usage: Json) -> Json:
        """Return the last object of a stream whose client asked for the numbers of tokens."""
        return self._object(self.shape.piece, []) | {"usage": usage}

    def _object(self, kind: str, choices: list[Json]) -> Json:
        names = {"id": f"{self.shape.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return names | {"choices": choices, "seed": self.seed}


def usage_of(answers: Sequence[Answer], count: int) -> Json:
    """Return the numbers of tokens; each prompt has `count` answers, and counts once."""
    prompts, new = sum(each.prompt_tokens for each in answers) // count, sum(each.completion_tokens for each in answers)
    cached = sum(each.cached_tokens for each in answers) // count
    found = {"prompt_tokens": prompts, "completion_tokens": new, "total_tokens": prompts + new}
    return found | {"prompt_tokens_details": {"cached_tokens": cached}}


def timings_of(request: Request, answer: Answer) -> Json:
    """Return what llama.cpp's server calls timings: of the prompt, up to the first token, and of the others."""
    begun, first, last = request.times[0], request.times[1], request.times[-1]
    found: Json = {}
    for name, count, seconds in (
        ("prompt", answer.prompt_tokens, first - begun),
        ("predicted", answer.completion_tokens, last - first),
    ):
        each = {"ms": 1e3 * seconds, "per_token_ms": 1e3 * seconds / max(1, count), "per_second": count / max(seconds, 1e-9)}
        found |= {f"{name}_n": count, **{f"{name}_{key}": value for key, value in each.items()}}
    return found


def error_of(message: str, kind: str, code: str | None = None) -> Json:
    """Return an error; half characters, which a client may have sent, are replaced."""
    message = message.encode("utf-8", "replace").decode()
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def model_entry(name: str, created: int, max_length: int) -> Mapping[str, Any]:
    """Return the entry of a model in the list of models."""
    return {"id": name, "object": "model", "created": created, "owned_by": "headrace", "max_model_len": max_length}
