"""A server from its options to its end: socket, plan, engine's thread, signals.

Invariant: the port is ours before a weight is read. Who connects before the model can answer waits.
"""

import contextlib
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import uvicorn

from headrace.ask.model_config import position_limit
from headrace.data.chat.prompts import Prompts
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import kept_copies
from headrace.generate.passes.whose_weights import open_generator
from headrace.generate.plan.plan import GenerationPlan
from headrace.generate.uses.answering import changes_of
from headrace.serve.app import LOOPBACK_NAME, Service
from headrace.serve.connections import Connection
from headrace.serve.desk import Desk
from headrace.serve.figures import ServerFigures
from headrace.serve.reading import Limits, RequestReader
from headrace.serve.tools.asking import Asking
from headrace.terms.errors import ConfigError, PlanInfeasible
from headrace.terms.events import Event, Sink
from headrace.terms.options.serve_options import ServeOptions

_MAX_LENGTH, _NEW_TOKENS = 4096, 512
# More seats are taken while they cost at most this share of the speed.
_LEAST_SPEED = 0.9


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that answers: the model's name, the address of the API, the plan. `end` ends it after what is under way."""

    name: str
    address: str
    plan: GenerationPlan
    end: Callable[[], None]


def serve(
    place: Path,
    options: ServeOptions,
    *,
    sink: Sink,
    tell_plan: Callable[[GenerationPlan], None],
    ready: Callable[["Serving"], None],
) -> None:
    """Answer requests for the model at `place` until a signal ends it, or `ready`, which is told when clients can ask.

    Raises:
        InputError: the model, an option, the port or the keys cannot be used.
        PlanInfeasible: no request of that length fits.
        Whatever ends a pass: nothing can be answered any more.
    """
    keys = read_keys(options)
    figures = ServerFigures()

    def heard(event: Event) -> None:
        figures.take(event)
        sink(event)

    with listening(options) as listener, open_generator(place, options.generation, heard) as generator:
        tokenizer = generator.model.tokenizer()
        changes = changes_of(generator, options.generation, tokenizer)
        limits = limits_of(generator, options)
        copies = kept_copies(generator.model.settings(1, None, {**changes, "max_new_tokens": 1}))
        new = limits.together - limits.prompt
        room = options.prefix_memory, options.prefix_ssd or 0
        generator.planner = generator.planner.keeping_prefixes(*room, limits.prompt, new, copies)
        plan = seats_plan_of(generator, options, limits, copies)
        tell_plan(plan)
        generator.use(plan)
        desk = Desk(generator, changes, options.max_requests)
        figures.watch(desk, plan.seats, generator.kept.prefixes)
        name = place.resolve().name
        day = options.template_date or generator.model.here.template_date
        variables = options.generation.template_variables
        reader = RequestReader(
            name,
            Asking(Prompts(generator.model.tokenizer(), False, options.system, day, variables), options.tool_dialect),
            limits,
        )
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        config = uvicorn.Config(
            Service(desk, reader, figures, keys, allowed_hosts(options)).app(),
            http=Connection,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            loop="asyncio",
            proxy_headers=False,
            server_header=False,
        )
        with _answering(desk) as failed:
            server = _Server(config, desk, lambda: ready(Serving(name, address, plan, server.end)))
            failed.append(server.end)
            server.run(sockets=[listener])


def limits_of(generator: Generator, options: ServeOptions) -> Limits:
    """Return the lengths that the server takes.

    Raises:
        ConfigError: the model has fewer positions.
    """
    positions = position_limit(generator.model.chain.config)
    if options.max_length is not None and positions and options.max_length > positions:
        raise ConfigError(f"max_length: {options.max_length} tokens are more than the {positions} positions of the model")
    together = options.max_length or min(_MAX_LENGTH, positions or _MAX_LENGTH)
    new = generator.model.generation_config.max_new_tokens or _NEW_TOKENS
    return Limits(prompt=together * 3 // 4, together=together, new=new)


def seats_plan_of(generator: Generator, options: ServeOptions, limits: Limits, copies: int = 0) -> GenerationPlan:
    """Return the plan with as many seats as requests, or fewer where more would not fit, or cost much of the speed.

    Raises:
        PlanInfeasible: not even one fits.
    """
    asked = options.max_requests, limits.prompt, limits.together - limits.prompt, copies
    best = generator.plan_only(*asked)
    seats = options.max_requests
    while options.seats is None and seats > best.seats:
        with contextlib.suppress(PlanInfeasible):
            found = generator.planner.with_seats(seats).plan(*asked)
            assert found.forecast is not None, "plans are made with one"
            assert best.forecast is not None, "as this one was"
            if found.forecast.tokens_per_second >= _LEAST_SPEED * best.forecast.tokens_per_second:
                return found
        seats //= 2
    return best


def allowed_hosts(options: ServeOptions) -> tuple[str, ...] | None:
    """Return the names by which clients may call the server, None for all.

    On loopback they are those of loopback. A page in a browser of this machine could otherwise ask under a name of its own,
    whose address it has changed to this machine's.
    """
    if options.allowed_hosts:
        return None if "*" in options.allowed_hosts else tuple(each.lower() for each in options.allowed_hosts)
    return (LOOPBACK_NAME, options.host.lower()) if _is_loopback(options.host) else None


def read_keys(options: ServeOptions) -> tuple[str, ...]:
    """Return the keys of which a request must bring one.

    Raises:
        ConfigError: the file cannot be read or has none; or other machines can reach the server, and no file is given.
    """
    if options.api_key_file is None:
        if not _is_loopback(options.host):
            raise ConfigError(
                f"host: {options.host} can be reached from other machines; give --api-key-file FILE with a key a line, or "
                "listen on 127.0.0.1"
            )
        return ()
    path = Path(options.api_key_file)
    try:
        keys = tuple(line.strip() for line in path.read_text(encoding="ascii").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file: {path}: cannot be read ({error}); give a file with a key a line") from error
    if not keys:
        raise ConfigError(f"api_key_file: {path} is empty; put a key a line into it")
    return keys


@contextlib.contextmanager
def listening(options: ServeOptions) -> Iterator[socket.socket]:
    """While entered, the address is taken; who connects waits.

    Raises:
        ConfigError: another program has it, or it is not this machine's.
    """
    found = _address_of(options.host)
    with socket.socket(socket.AF_INET6 if ":" in found else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((found, options.port))
            listener.listen()
        except OSError as error:
            raise ConfigError(
                f"port: {options.host}:{options.port} cannot be listened on ({error.strerror}); give another --port, or end "
                "what has it"
            ) from error
        yield listener


def _address_of(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host: {host!r} is not known ({error}); give an address of this machine") from error


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(_address_of(host).partition("%")[0]).is_loopback


class _Server(uvicorn.Server):
    """uvicorn's, with signals that end it after what is under way: the first such, the next at once."""

    def __init__(self, config: uvicorn.Config, desk: Desk, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._desk, self._ready = desk, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what has begun, refuse the rest."""
        self._desk.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """While entered, signals end the server; uvicorn's own would raise them once more at the end."""
        if threading.current_thread() is not threading.main_thread():  # Python gives signals to that one alone
            yield
            return
        found = {number: signal.signal(number, self._end) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in found.items():
                signal.signal(number, handler)

    def end(self) -> None:
        """End after what is under way."""
        self.should_exit = True

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        if self.force_exit:
            self._desk.close(at_once=True)
        self.should_exit = True


@contextlib.contextmanager
def _answering(desk: Desk) -> Iterator[list[Callable[[], None]]]:
    """While entered, a thread answers the desk's requests. If that fails, what is yielded is called, and the error raised."""
    if_failed: list[Callable[[], None]] = []
    errors: list[BaseException] = []
    threads = torch.get_num_threads()

    def answer() -> None:
        torch.set_num_threads(threads)  # torch keeps the number of threads for each thread
        try:
            desk.answer()
        except BaseException as error:
            errors.append(error)
            for call in if_failed:
                call()

    thread = threading.Thread(target=answer, name="headrace serve", daemon=True)
    thread.start()
    try:
        yield if_failed
    finally:
        desk.close(at_once=True)
        thread.join()
    if errors:
        raise errors[0]
