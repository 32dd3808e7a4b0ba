"""What a generation measured of itself, beside what its plan said."""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from headrace.generate.plan.plan import GenerationPlan
from headrace.model.seats.seats import Seated, tokens_of_pass
from headrace.terms.events import Event, GenerationPass, Sink
from headrace.terms.plain_figures import plain_figure
from headrace.terms.sizes import format_bytes, format_seconds


class PromptProgress:
    """How many tokens of its prompt each seat has still to run."""

    def __init__(self) -> None:
        self._left: WeakKeyDictionary[Seated, int] = WeakKeyDictionary()

    def enters(self, seat: Seated, tokens: int) -> None:
        """Note a seat, whose prompt has so many tokens."""
        self._left[seat] = tokens

    def take(self, seats: Sequence[Seated]) -> tuple[int, int]:
        """Count the tokens that seats are about to run: return how many seats run prompts, and how many of these end theirs."""
        entering = [seat for seat in seats if self._left.get(seat, 0) > 0 and seat.hidden is not None]
        for seat in entering:
            self._left[seat] -= tokens_of_pass(seat)
        return len(entering), sum(self._left[seat] <= 0 for seat in entering)


@dataclass(slots=True)
class _Passes:
    """Sums over passes."""

    count: int = 0
    seconds: float = 0.0
    bytes_read: int = 0
    wanted: int = 0
    found: int = 0
    router_seconds: float = 0.0

    def add(self, event: GenerationPass) -> None:
        self.count += 1
        self.seconds += event.seconds
        self.bytes_read += event.bytes_read
        self.wanted += event.wanted
        self.found += event.found
        self.router_seconds += event.router_seconds


class Measured:
    """A sink that adds up passes, and gives every event to `sink`."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._all, self._following = _Passes(), _Passes()  # these run no prompts
        self._first_seconds: float | None = None

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, GenerationPass):
            self._all.add(event)
            if event.begun and self._first_seconds is None:
                self._first_seconds = self._all.seconds
            if not event.entering:
                self._following.add(event)
        self._sink(event)

    def words(self, plan: GenerationPlan | None, tokens: int) -> str:
        """Return one line about passes that made `tokens` new tokens, with what was planned in brackets; "" without passes."""
        forecast, first = plan.forecast if plan is not None else None, self._first_seconds
        if plan is None or forecast is None or first is None:
            return ""
        speed = plain_figure(tokens / self._all.seconds)
        planned = 1 / (1 / forecast.tokens_per_second + forecast.cold_seconds / max(1, tokens))
        found = [f"{speed} tokens/s ({plain_figure(planned)} planned)"]
        if (following := self._following).count:
            seconds = format_seconds(following.seconds / following.count)
            found.append(f"{seconds} a token of each row ({format_seconds(forecast.pass_seconds)})")
        found.append(f"{format_seconds(first)} before the first ({format_seconds(forecast.first_pass_seconds)})")
        if following.count:
            read = format_bytes(following.bytes_read // following.count)
            found.append(f"{read} read for each pass ({format_bytes(forecast.read_bytes)})")
        return f"measured {'; '.join([*found, *self._experts(plan)])}"

    def _experts(self, plan: GenerationPlan) -> list[str]:
        """Return how many of the wanted experts were in memory, and how long compute waited for those that routers chose."""
        every = self._all
        if plan.experts is None or not every.wanted:
            return []
        hits, share = every.found / every.wanted, plan.experts.cached_share
        return [
            f"{hits:.0%} of the wanted experts were in memory ({share:.0%} if all were wanted alike)",
            f"{every.router_seconds / every.seconds:.0%} of the time waited for experts that routers chose",
        ]
