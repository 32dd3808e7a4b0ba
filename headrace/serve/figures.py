"""What the server counts, in the text that Prometheus reads."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headrace.generate.passes.prompts_on_their_way import Borders
from headrace.generate.uses.answering import Answer
from headrace.serve.desk import Desk
from headrace.terms.events import Event, GenerationPass

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)


class ServerFigures:
    """Counters of one server."""

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()
        self._requests = Counter("headrace_requests", "Requests by endpoint and status.", ("endpoint", "status"), registry=own)
        self._prompt_tokens = Counter("headrace_prompt_tokens", "Tokens of answered prompts.", registry=own)
        self._kept_tokens = Counter("headrace_prompt_tokens_cached", "Those of them that were kept, not read.", registry=own)
        self._new_tokens = Counter("headrace_generated_tokens", "Tokens of answers.", registry=own)
        self._first = Histogram("headrace_first_token_seconds", "Time to the first text.", buckets=_SECONDS, registry=own)
        self._whole = Histogram("headrace_request_seconds", "Time to the end of an answer.", buckets=_SECONDS, registry=own)
        self._passes = Counter("headrace_passes", "Passes through the model.", registry=own)
        self._pass_seconds = Counter("headrace_pass_seconds", "Time of passes.", registry=own)
        self._seated = Counter("headrace_pass_seats", "Seats of passes, added up.", registry=own)
        self._read = Counter("headrace_weight_bytes_read", "Bytes of weights read from drives.", registry=own)
        self._cached = Counter("headrace_cache_bytes_read", "Bytes of keys and values read from drives.", registry=own)

    def watch(self, desk: Desk, seats: int, prefixes: Borders | None) -> None:
        """Show how many requests the desk has, and what is kept of prompts."""
        gauges: dict[str, tuple[str, Callable[[], int]]] = {
            "running": ("Requests in seats.", lambda: desk.seated),
            "waiting": ("Requests without a seat.", lambda: desk.waiting),
            "seats": ("Seats.", lambda: seats),
            "prefix_bytes": ("Bytes of kept beginnings of prompts.", lambda: prefixes.num_bytes if prefixes else 0),
            "prefix_chunks": ("Chunks of kept beginnings of prompts.", lambda: prefixes.chunks if prefixes else 0),
        }
        for name, (words, found) in gauges.items():
            Gauge(f"headrace_{name}", words, registry=self._registry).set_function(found)

    def take(self, event: Event) -> None:
        """Count what passes do."""
        if isinstance(event, GenerationPass):
            self._passes.inc()
            self._pass_seconds.inc(event.seconds)
            self._seated.inc(event.seats)
            self._read.inc(event.bytes_read - event.cache_bytes_read)
            self._cached.inc(event.cache_bytes_read)

    def responded(self, endpoint: str, status: int) -> None:
        """Count a response."""
        self._requests.labels(endpoint, str(status)).inc()

    def first_text(self, seconds: float) -> None:
        """Note when a stream's first text came."""
        self._first.observe(seconds)

    def answered(self, answer: Answer, seconds: float) -> None:
        """Count an answer."""
        self._prompt_tokens.inc(answer.prompt_tokens)
        self._kept_tokens.inc(answer.cached_tokens)
        self._new_tokens.inc(answer.completion_tokens)
        self._whole.observe(seconds)

    def text(self) -> bytes:
        """Return all of it as Prometheus reads it."""
        return generate_latest(self._registry)
