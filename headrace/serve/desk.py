"""Where requests become seats: clients' threads hand them in, the engine's thread answers them.

A request is a micro-batch of one row. Those that wait join the running passes as soon as a seat is free; so all that are under
way share each reading of the weights.

Invariant: a request's tokens are those of `generate` on it alone, whoever else is served.
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import StoppingCriteria

from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import Generated, SeatRows
from headrace.generate.passes.opened import end_tokens
from headrace.generate.uses.answering import LENGTH, Answer, answers_of
from headrace.generate.uses.scores import Scores, Steering
from headrace.generate.uses.watching import watched
from headrace.terms.errors import HeadraceError, InputError


class Full(HeadraceError):
    """As many requests as allowed are under way."""


class Unanswered(HeadraceError):
    """The model gives no answer."""


class ServerClosing(HeadraceError):
    """The server ends: it answers what has begun, and nothing else."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A request has its seat."""


Told = Begun | str | Answer | Exception


@dataclass(eq=False)
class Request:
    """One request: token ids, settings as `GenerateOptions.settings` has them, and the most new tokens; 0: only its prompt is
    scored. `scores` has what `steering` asks to note, once it has a seat.

    `tell` is called from the engine's thread, in this order: `Begun`; pieces of text, if it `streams`; then an `Answer`. Or, at
    any time, an error, which is the last. `special`: texts have special tokens. Beginnings of prompts are kept for requests of
    the same `owner`.
    """

    ids: tuple[int, ...]
    settings: Mapping[str, Any]
    new_tokens: int
    tell: Callable[[Told], None]
    streams: bool = False
    special: bool = False
    steering: Steering = field(default_factory=Steering)
    scores: Scores | None = None
    seed: int = field(default_factory=lambda: secrets.randbits(32))
    owner: Hashable = ()
    is_gone: bool = False
    came: float = field(default_factory=time.monotonic)
    times: list[float] = field(default_factory=list)  # when it got its seat, and each token


class _Gone(StoppingCriteria):  # type: ignore[misc]
    """Ends a row whose client has gone away."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._request.times.append(time.monotonic())
        return torch.full((input_ids.shape[0],), self._request.is_gone, dtype=torch.bool, device=input_ids.device)


class Desk:
    """Takes requests for a `generator` that has its plan. `changes` are the settings that all have, the tokenizer among them.

    At most `most` are under way at once, in seats and waiting.
    """

    def __init__(self, generator: Generator, changes: Mapping[str, Any], most: int) -> None:
        self._generator, self._changes, self._most = generator, changes, most
        self._changed = threading.Condition()
        self._waiting, self._seated = deque[Request](), dict[int, Request]()
        self._entered, self._is_closing = 0, False

    @property
    def most(self) -> int:
        """The most requests at once."""
        return self._most

    @property
    def waiting(self) -> int:
        """Requests without a seat."""
        return len(self._waiting)

    @property
    def seated(self) -> int:
        """Requests in seats."""
        return len(self._seated)

    @property
    def is_closing(self) -> bool:
        """Whether it takes no more."""
        return self._is_closing

    def hand_in(self, *requests: Request) -> None:
        """Take requests, all or none of them, which are told what comes of them.

        Raises:
            Full: there are as many as allowed.
            Closing: the server ends.
        """
        with self._changed:
            if self._is_closing:
                raise ServerClosing("the server ends; ask again when it is back")
            if len(self._waiting) + len(self._seated) + len(requests) > self._most:
                raise Full(f"{self._most} requests at once are the most (--max-requests); ask again later")
            self._waiting.extend(requests)
            self._changed.notify()

    def let_go(self, *requests: Request) -> None:
        """Forget requests whose client has gone: their seats are free after the running pass."""
        with self._changed:
            for request in requests:
                request.is_gone = True
                if request in self._waiting:
                    self._waiting.remove(request)

    def close(self, *, at_once: bool = False) -> None:
        """Take no more, refuse those that wait, and let the thread end when those in seats are answered, or `at_once`."""
        with self._changed:
            self._is_closing = True
            refused = [*self._waiting]
            self._waiting.clear()
            for request in self._seated.values():
                request.is_gone |= at_once
            self._changed.notify()
        for request in refused:
            request.tell(ServerClosing("the server ends; ask again when it is back"))

    def answer(self) -> None:
        """Answer requests until the desk is closed: the work of the engine's thread.

        Raises:
            Whatever a pass raises; all that were under way have been told.
        """
        try:
            for done in self._generator.run(self._entering(), contain=True):
                with self._changed:
                    request = self._seated.pop(done.batch.number)
                if not request.is_gone:
                    request.tell(self._told(done, request))
        except BaseException as error:
            self.close()
            for request in self._seated.values():
                request.tell(error if isinstance(error, Exception) else ServerClosing("the server was ended"))
            self._seated.clear()
            raise

    def _entering(self) -> Iterator[SeatRows | None]:
        """Yield who takes the next free seat, None while nobody waits; wait for somebody where no seat is taken."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._seated or self._is_closing)
                if not self._waiting and not self._seated:
                    return
                request = next((each for each in self._waiting if not self._should_wait(each)), None)
                if request is not None:
                    self._waiting.remove(request)
                    number = self._entered = self._entered + 1
                    self._seated[number] = request
            if request is None:
                yield None
                continue
            try:
                settings = self._settings(request)
                passed = None if request.scores is None else request.scores.passed
                owner = request.owner if passed is None else None  # scores need all of the prompt
                batch = SeatRows(number, (request.ids,), request.seed, settings, passed, owner)
            except InputError as error:
                with self._changed:
                    del self._seated[number]
                request.tell(error)
                continue
            request.times.append(time.monotonic())
            request.tell(Begun())
            yield batch

    def _should_wait(self, request: Request) -> bool:
        """Return whether a request in a seat is reading what this one begins with: it is there after the running pass."""
        return self._generator.kept.is_being_read(request.owner, request.ids)

    def _settings(self, request: Request) -> dict[str, Any]:
        """Return the arguments of transformers' `generate`.

        Raises:
            InputError: the model cannot read the tokens, or a setting is refused.
        """
        model = self._generator.model
        model.check_tokens(request.ids)
        steering = request.steering
        for name, tokens in (("stop_token_ids", steering.ends), ("logit_bias", tuple(steering.bias))):
            model.check_tokens(tokens or request.ids, name)
        asked = {**self._changes, **request.settings, "max_new_tokens": max(1, request.new_tokens)}
        settings = model.settings(len(request.ids), None, asked)
        if steering.ends:
            config = settings["generation_config"]
            config.eos_token_id = sorted(end_tokens(config) | {*steering.ends})
        request.scores = Scores(steering, request.ids, model.chain.logits)
        write = request.tell if request.streams and request.new_tokens else None
        gone = _Gone(request)
        return watched(settings, (request.ids,), write, gone, special=request.special, scores=request.scores)

    def _told(self, done: Generated, request: Request) -> Told:
        if done.error is not None:
            return done.error
        scores = request.scores
        if scores is not None and request.steering.prompt_top is not None and len(scores.prompt) < len(request.ids):
            return Unanswered(f"{len(scores.prompt)} of {len(request.ids)} tokens of the prompt were scored")
        answer = next(answers_of(done))
        if request.new_tokens == 0 and not answer.error:
            return Answer("", LENGTH, answer.prompt_tokens, 0)
        return Unanswered(answer.error) if answer.error else replace(answer, cached_tokens=done.cached)
