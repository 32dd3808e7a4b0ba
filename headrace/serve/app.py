"""The endpoints: HTTP in, requests to the desk, JSON or a stream of events out.

Only the endpoints named here exist. A client that goes away is let go, whether its answer streams or not.
"""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import anyio
from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.generate.uses.answering import Answer
from headrace.serve.desk import Begun, Desk, Full, ServerClosing, Told
from headrace.serve.desk import Request as Handed
from headrace.serve.figures import ServerFigures
from headrace.serve.reading import GenerationRequest, Refused, RequestReader
from headrace.serve.shapes import CHAT, TEXT, AnswerChoice, EndpointShape, Reply, error_of, model_entry, timings_of, usage_of
from headrace.serve.tools.dialect import Json
from headrace.terms.errors import InputError, in_one_line, shortened

MAX_BODY_SECONDS = 60.0
# Requests whose bodies come, besides those that the desk takes.
MORE_BEING_READ = 64
LOOPBACK_NAME = "localhost"
# JSON writes a character in up to six bytes; a token seldom has more than ten characters.
MAX_BYTES_PER_TOKEN, LEAST_BODY_BYTES = 64, 1 << 16
_Found = TypeVar("_Found")
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_INVALID, _OVERLOADED, _BROKEN = "invalid_request_error", "overloaded_error", "server_error"


class Service:
    """What the endpoints share. One of `keys` must come with a request, unless there are none; `hosts` are the names by which
    the server may be called, None for all.
    """

    def __init__(
        self,
        desk: Desk,
        reader: RequestReader,
        figures: ServerFigures,
        keys: Sequence[str] = (),
        hosts: Sequence[str] | None = None,
    ) -> None:
        self._hosts, self._being_read = hosts, 0
        self._desk, self._reader, self._figures = desk, reader, figures
        self._keys = tuple(key.encode() for key in keys)
        self._card = model_entry(reader.name, int(time.time()), reader.limits.together)
        self._one_reader = anyio.CapacityLimiter(1)  # tokenizers are no tool for two threads

    def app(self) -> ASGIApp:
        """Return the application."""
        guarded: dict[str, tuple[str, Callable[[Request], Awaitable[Response]]]] = {
            "/v1/chat/completions": ("POST", partial(self._complete, CHAT)),
            "/v1/completions": ("POST", partial(self._complete, TEXT)),
            "/v1/models": ("GET", self._models),
            "/v1/models/{name:path}": ("GET", self._model),
            "/metrics": ("GET", self._metrics),
        }
        routes = [Route(path, self._called(self._guarded(answer)), methods=[verb]) for path, (verb, answer) in guarded.items()]
        routes.append(Route("/health", self._called(self._health)))
        refused: Any = dict.fromkeys((HTTPException, Refused, InputError, Full, ServerClosing, Exception), _refusal)
        return _counting(Starlette(routes=routes, exception_handlers=refused), {route.path for route in routes}, self._figures)

    # -- endpoints --------------------------------------------------------------------------------------------------

    async def _health(self, http: Request) -> Response:
        closing = self._desk.is_closing
        return JSONResponse({"status": "closing" if closing else "ok"}, 503 if closing else 200)

    async def _metrics(self, http: Request) -> Response:
        return Response(self._figures.text(), headers={"content-type": _METRICS})

    async def _models(self, http: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def _model(self, http: Request) -> Response:
        if http.path_params["name"] != self._reader.name:
            raise Refused(f"this server has {self._reader.name!r} alone", 404, "model_not_found")
        return JSONResponse(self._card)

    async def _complete(self, shape: EndpointShape, http: Request) -> Response:
        if self._being_read >= self._desk.most + MORE_BEING_READ:
            raise Full(f"{self._being_read} requests are being read; ask again later")
        self._being_read += 1
        try:
            content = await self._body(http)
            asked = await run_sync(self._reader.read, shape, content, limiter=self._one_reader)
        finally:
            self._being_read -= 1
        told, choices = self._handed_in(asked, getattr(http.state, "key", None))
        requests = [choice.request for choice in choices]
        reply = Reply(shape, self._reader.name, requests[0].seed)
        answers: dict[int, Answer] = {}
        try:
            while len(answers) < len(choices):
                index, found = await _unless_gone(http, told.get)
                if isinstance(found, Begun) and asked.streams:
                    return _Events(self._events(asked, reply, choices, told), lambda: self._desk.let_go(*requests))
                if isinstance(found, Exception):
                    self._desk.let_go(*requests)
                    return _refusal(http, found)
                if isinstance(found, Answer):
                    answers[index] = found
                    self._figures.answered(found, time.monotonic() - requests[index].came)
        except ClientDisconnect:
            self._desk.let_go(*requests)
            return Response(status_code=499)  # nobody reads it; nginx's word for it is what metrics show
        found_all = [answers[choice.index] for choice in choices]
        whole = reply.whole(
            [choice.whole(answers[choice.index]) for choice in choices], usage_of(found_all, asked.extras.count)
        )
        beside = choices[0].of_prompt if shape.is_chat else {}
        return JSONResponse(whole | beside | self._timings(asked, choices[0], answers[0]))

    async def _events(
        self, asked: GenerationRequest, reply: Reply, choices: Sequence[AnswerChoice], told: "asyncio.Queue[tuple[int, Told]]"
    ) -> AsyncIterator[str]:
        """Yield the events of a stream, one of whose requests has its seat."""
        texts, answers = set[int](), list[Answer]()
        begun = {choice.index for choice in choices if asked.shape.is_chat}
        for index in sorted(begun):
            for piece in choices[index].begin():
                yield _event(reply.piece(piece))
        while len(answers) < len(choices):
            index, found = await told.get()
            choice = choices[index]
            if isinstance(found, Begun):
                continue
            if isinstance(found, Exception):
                yield _event(json.loads(bytes(_refusal(None, found).body)))
                return
            pieces = [] if index in begun else choice.begin()
            begun.add(index)
            if isinstance(found, Answer):
                pieces += choice.pieces(found.text) if found.text and index not in texts else []  # beams come whole
                pieces += choice.end(found)
                answers.append(found)
                self._figures.answered(found, time.monotonic() - choice.request.came)
            else:
                if index not in texts:
                    self._figures.first_text(time.monotonic() - choice.request.came)
                texts.add(index)
                pieces += choice.pieces(str(found))
            timings = self._timings(asked, choice, found) if isinstance(found, Answer) else {}
            for piece in pieces:
                yield _event(reply.piece(piece) | (timings if piece["finish_reason"] else {}))
        if asked.tells_usage:
            yield _event(reply.usage(usage_of(answers, asked.extras.count)))
        yield "data: [DONE]\n\n"

    @staticmethod
    def _timings(asked: GenerationRequest, choice: AnswerChoice, answer: Answer) -> Json:
        return {"timings": timings_of(choice.request, answer)} if asked.extras.timings else {}

    # -- what they are made of --------------------------------------------------------------------------------------

    def _called(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that answers who calls the server by a name that is allowed."""

        async def called(http: Request) -> Response:
            host = _name_of(http.headers.get("host", ""))
            if (
                self._hosts is not None
                and host not in self._hosts
                and not (LOOPBACK_NAME in self._hosts and _is_loopback(host))
            ):
                name = shortened(repr(host), 80)
                raise Refused(f"this server is not called {name}; start it with --allowed-hosts to allow that name", 403)
            return await answer(http)

        return called

    def _guarded(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that answers who has a key."""

        async def guarded(http: Request) -> Response:
            scheme, _, given = http.headers.get("authorization", "").partition(" ")
            key = given.strip().encode()
            known = [hmac.compare_digest(key, each) for each in self._keys]
            if known and not (scheme.lower() == "bearer" and any(known)):
                raise Refused("give one of this server's keys as Authorization: Bearer KEY", 401, "invalid_api_key")
            http.state.key = hashlib.sha256(key).hexdigest() if known else None
            return await answer(http)

        return guarded

    async def _body(self, http: Request) -> bytes:
        """Return a body, of a size and within a time that are bounded.

        Raises:
            Refused: it is too large, too slow, or not said to be JSON.
        """
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused("send JSON, with Content-Type: application/json", 415)
        most, found = max(LEAST_BODY_BYTES, MAX_BYTES_PER_TOKEN * self._reader.limits.together), bytearray()
        try:
            async with asyncio.timeout(MAX_BODY_SECONDS):
                async for piece in http.stream():
                    found += piece
                    if len(found) > most:
                        raise Refused(f"the body has more than {most} bytes, the most for this server's --max-length", 413)
        except TimeoutError as error:
            raise Refused(f"the body did not come within {MAX_BODY_SECONDS:.0f} seconds", 408) from error
        except ClientDisconnect as error:
            raise Refused("the body ends early") from error
        return bytes(found)

    def _handed_in(
        self, asked: GenerationRequest, key: str | None
    ) -> tuple["asyncio.Queue[tuple[int, Told]]", list[AnswerChoice]]:
        """Hand a request in, for each answer one, with the digest of its key; return where it is told what comes of them.

        Raises:
            Refused: it asks for more answers than the server takes requests.
            Full, Closing: it was not taken.
        """
        told, loop = asyncio.Queue[tuple[int, Told]](), asyncio.get_running_loop()
        extras, choices = asked.extras, list[AnswerChoice]()
        if len(asked.prompts) * extras.count > self._desk.most:
            found = f"{len(asked.prompts)} prompts with {extras.count} answers each"
            raise Refused(f"{found} are more than the {self._desk.most} requests of this server (--max-requests)")

        def tell(index: int, found: Told) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever would hear it
                loop.call_soon_threadsafe(told.put_nowait, (index, found))

        seed = secrets.randbits(32) if asked.seed is None else asked.seed
        for index in range(len(asked.prompts) * extras.count):
            place, number = divmod(index, extras.count)
            request = Handed(
                asked.prompts[place],
                asked.settings,
                asked.new_tokens,
                partial(tell, index),
                streams=asked.streams,
                special=asked.speech is not None,
                steering=extras.steering,
                seed=seed + number,
                owner=(key, asked.salt),
            )
            words, echoed = cache(lambda token: self._reader.text_of([token])), asked.texts[place] if extras.echo else ""
            choices.append(AnswerChoice(asked.shape, index, request, words, asked.speech and asked.speech(), echoed))
        self._desk.hand_in(*(choice.request for choice in choices))
        return told, choices


class _Events(StreamingResponse):
    """A stream of server-sent events; `ended` is called at its end, however it ends."""

    def __init__(self, events: AsyncIterator[str], ended: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


async def _unless_gone(http: Request, found: Callable[[], Awaitable[_Found]]) -> _Found:
    """Return what `found()` gives.

    Raises:
        ClientDisconnect: the client goes away before.
    """

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(found()), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


def _name_of(host: str) -> str:
    """Return the name in a Host header, without the port."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


def _is_loopback(name: str) -> bool:
    """Return whether a client that calls the server so means its own machine; "": it names none, as no browser does."""
    if name in ("", LOOPBACK_NAME):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _refusal(http: Request | None, error: Any) -> Response:
    """Return an error as OpenAI's API has it."""
    if isinstance(error, Refused):
        return JSONResponse(error_of(str(error), _INVALID, error.code), error.status)
    if isinstance(error, HTTPException):  # another path, or another verb
        return JSONResponse(error_of(f"{error.detail}: this server has no such endpoint", _INVALID), error.status_code)
    if isinstance(error, InputError):
        return JSONResponse(error_of(str(error), _INVALID), 400)
    if isinstance(error, Full):
        return JSONResponse(error_of(str(error), _OVERLOADED), 429, {"retry-after": "1"})
    if isinstance(error, ServerClosing):
        return JSONResponse(error_of(str(error), _OVERLOADED), 503)
    return JSONResponse(error_of(f"the answer failed: {in_one_line(error)}", _BROKEN), 500)


def _event(value: Json) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _counting(app: ASGIApp, paths: set[str], figures: ServerFigures) -> ASGIApp:
    """Return `app`, with each response counted by its path, if that is known, and its status."""

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                figures.responded(scope["path"] if scope["path"] in paths else "other", message["status"])
            await send(message)

        await app(scope, receive, sent)

    return counted
