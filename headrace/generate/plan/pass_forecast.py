"""What passes of a generation will take, as a value and in words."""

from dataclasses import dataclass
from typing import Any

from headrace.terms.machine.ceilings import NOMINAL
from headrace.terms.plain_figures import plain_figure
from headrace.terms.sizes import about_seconds, format_bytes, format_seconds, rough_figure


@dataclass(frozen=True, slots=True, kw_only=True)
class PassForecast:
    """What a pass, and a whole batch, will take. `limiting` names the lane for which a pass waits, in words.

    Weights that stay come once, before the first token: so long are `cold_seconds` of `first_pass_seconds`, and they are in no
    rate of tokens.
    """

    pass_seconds: float
    first_pass_seconds: float
    cold_seconds: float
    tokens_per_second: float
    limiting: str
    read_bytes: int  # of a pass, from the drives
    written_bytes: int = 0  # for all prompts, to the drives
    wear: str = ""  # that as a share of their endurance, in words
    machine: str
    instead: "tuple[FasterWay, ...]" = ()  # changes of what was asked that would be faster

    @property
    def is_guess(self) -> bool:
        """Whether nobody measured the machine."""
        return self.machine.startswith(f"a {NOMINAL} machine")


@dataclass(frozen=True, slots=True, kw_only=True)
class FasterWay:
    """A change of what was asked that makes tokens come faster, in words and as options, and its forecast."""

    change: str
    options: dict[str, Any]
    forecast: PassForecast


def explain_times(
    found: PassForecast, prompts: int, new_tokens: int, together: int, plain: PassForecast | None, plain_dtype: str
) -> list[str]:
    """Return what a token takes, then what comes before the first, and how all prompts fare. Guesses look like guesses.

    So many prompts are answered `together`. `plain` is what decoded weights in `plain_dtype` would take, where anybody asked.
    """
    seconds = about_seconds if found.is_guess else format_seconds
    rate = together / found.pass_seconds
    speed = f"about {rough_figure(rate)}" if found.is_guess else plain_figure(rate)
    read = f"; {format_bytes(found.read_bytes)} read for each pass" if found.read_bytes else ""
    cold = (
        f", {seconds(found.cold_seconds)} of it to load weights once"
        if found.cold_seconds > 0.01 * found.first_pass_seconds
        else ""
    )
    all_seconds = found.cold_seconds + prompts * new_tokens / found.tokens_per_second
    answers = f"all {prompts} answers" if prompts > 1 else "the whole answer"
    lines = [
        f"speed    {seconds(found.pass_seconds)} a token, {speed} tokens/s on {found.machine}; "
        f"limited by {found.limiting}{read}",
        f"first    {seconds(found.first_pass_seconds)} to the first token{cold}; {seconds(all_seconds)} for {answers}",
    ]
    if plain is not None:
        times = plain.pass_seconds / found.pass_seconds
        how = f"{times:.2f} times as fast as" if times >= 1 else "slower than"
        lines.append(f"code     {how} plain {plain_dtype}, which would take {seconds(plain.pass_seconds)} a token")
    for each in found.instead:
        times = found.pass_seconds / each.forecast.pass_seconds
        lines.append(f"instead  {each.change}: {seconds(each.forecast.pass_seconds)} a token, {times:.1f} times as fast")
    if found.written_bytes:
        lines.append(f"drives   {format_bytes(found.written_bytes)} written for all prompts{found.wear}")
    return lines
