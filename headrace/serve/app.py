"""The endpoints: HTTP in, requests to the desk, JSON or a stream of events out.

Only the endpoints named here exist. A client that goes away is let go, whether its answer streams or not.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

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
from headrace.serve.shapes import CHAT, TEXT, EndpointShape, Reply, error_of, model_entry
from headrace.serve.tools.dialect import Json
from headrace.terms.errors import InputError, in_one_line, shortened

MAX_BODY_SECONDS = 60.0
# Requests whose bodies come, besides those that the desk takes.
MORE_BEING_READ = 64
LOOPBACK_NAME = "localhost"
# JSON writes a character in up to six bytes; a token seldom has more than ten characters.
MAX_BYTES_PER_TOKEN, LEAST_BODY_BYTES = 64, 1 << 16
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
        told, request = self._handed_in(asked)
        reply = Reply(shape, self._reader.name, request.seed, asked.speech and asked.speech())
        try:
            found = await _unless_gone(http, told.get)
            if asked.streams and isinstance(found, Begun):
                return _Events(self._events(asked, reply, request, told), lambda: self._desk.let_go(request))
            if isinstance(found, Begun):
                found = await _unless_gone(http, told.get)
        except ClientDisconnect:
            self._desk.let_go(request)
            return Response(status_code=499)  # nobody reads it; nginx's word for it is what metrics show
        if not isinstance(found, Answer):
            return _refusal(http, found)
        self._figures.answered(found, time.monotonic() - request.came)
        return JSONResponse(reply.whole(found))

    async def _events(
        self, asked: GenerationRequest, reply: Reply, request: Handed, told: "asyncio.Queue[Told]"
    ) -> AsyncIterator[str]:
        """Yield the events of a stream, whose request has its seat."""
        if (begin := reply.begin()) is not None:
            yield _event(begin)
        has_text = False
        while not isinstance(found := await told.get(), Answer):
            if isinstance(found, Exception):
                yield _event(json.loads(bytes(_refusal(None, found).body)))
                return
            if not has_text:
                self._figures.first_text(time.monotonic() - request.came)
            has_text = True
            for piece in reply.pieces(str(found)):
                yield _event(piece)
        rest = [] if has_text or not found.text else reply.pieces(found.text)  # beams come whole
        self._figures.answered(found, time.monotonic() - request.came)
        for piece in (*rest, *reply.end(found)):
            yield _event(piece)
        if asked.tells_usage:
            yield _event(reply.usage(found))
        yield "data: [DONE]\n\n"

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
            known = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
            if known and not (scheme.lower() == "bearer" and any(known)):
                raise Refused("give one of this server's keys as Authorization: Bearer KEY", 401, "invalid_api_key")
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

    def _handed_in(self, asked: GenerationRequest) -> tuple["asyncio.Queue[Told]", Handed]:
        """Hand a request in; return where it is told what comes of it.

        Raises:
            Full, Closing: it was not taken.
        """
        told, loop = asyncio.Queue[Told](), asyncio.get_running_loop()

        def tell(found: Told) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever would hear it
                loop.call_soon_threadsafe(told.put_nowait, found)

        request = Handed(asked.ids, asked.settings, asked.new_tokens, tell, asked.streams, asked.speech is not None)
        if asked.seed is not None:
            request.seed = asked.seed
        self._desk.hand_in(request)
        return told, request


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


async def _unless_gone(http: Request, found: Callable[[], Awaitable[Told]]) -> Told:
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
