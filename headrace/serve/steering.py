"""Keys of requests beside those of `generate`: how many answers, what is noted of their tokens, what steers them.

Invariant: a key is computed or refused; its neutral values stand in the table of `data.chat.request_keys`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.generate.uses.scores import Steering
from headrace.terms.errors import DataError, shortened
from headrace.terms.options.option_kinds import Flag, Listed, Number, Whole

STEERING_KEYS = (
    *("n", "logprobs", "top_logprobs", "prompt_logprobs", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("stop_token_ids", "timings_per_token"),
)
TEXT_KEYS = ("prompt", "echo")
_MOST_TOP, _MOST_BIASES, _MOST_ANSWERS = 20, 1024, 128
_MOST_TOKEN = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Extras:
    """`count` answers a prompt; whether the text has the prompt before it (`echo`); whether answers tell their `timings`."""

    count: int = 1
    steering: Steering = field(default_factory=Steering)
    echo: bool = False
    timings: bool = False


def extras_of(body: Mapping[str, Any], *, is_chat: bool) -> Extras:
    """Return what a body asks.

    Raises:
        InputError: a value is not understood, or is beyond its bounds.
    """
    given = {key: value for key, value in body.items() if value is not None}
    whole = Whole(0, _MOST_TOP)
    top = given.get("logprobs", False)
    if is_chat:
        if not isinstance(top, bool):
            raise DataError(f"logprobs must be true or false, and top_logprobs a number, found {shortened(repr(top))}")
        if not top and given.get("top_logprobs"):
            raise DataError("top_logprobs are beside logprobs; ask for logprobs: true, too")
        top = whole.read(given.get("top_logprobs", 0), "top_logprobs") if top else None
    else:
        top = None if top is False else whole.read(top, "logprobs")
    of_prompt = given.get("prompt_logprobs", False)
    if of_prompt is not False and given.get("stream"):
        raise DataError("prompt_logprobs come with whole answers; leave stream out")
    echo = not is_chat and Flag().read(given.get("echo", False), "echo")
    tops = [] if of_prompt is False else [whole.read(of_prompt, "prompt_logprobs")]
    tops += [top] if echo and top is not None else []
    steering = Steering(
        top=top,
        prompt_top=max(tops, default=None),
        frequency=Number(-2, 2).read(given.get("frequency_penalty", 0), "frequency_penalty"),
        presence=Number(-2, 2).read(given.get("presence_penalty", 0), "presence_penalty"),
        bias=_bias_of(given.get("logit_bias", {})),
        ends=Listed(Whole(0, _MOST_TOKEN), most=_MOST_BIASES).read(given.get("stop_token_ids", []), "stop_token_ids"),
    )
    count = Whole(1, _MOST_ANSWERS).read(given.get("n", 1), "n")
    return Extras(count, steering, echo, Flag().read(given.get("timings_per_token", False), "timings_per_token"))


def _bias_of(given: Any) -> dict[int, float]:
    if not isinstance(given, dict) or len(given) > _MOST_BIASES:
        raise DataError(f"logit_bias must be an object of at most {_MOST_BIASES} tokens, found {shortened(repr(given))}")
    return {
        Whole(0, _MOST_TOKEN).read(key, "logit_bias"): Number(-100, 100).read(value, f"logit_bias.{shortened(key)}")
        for key, value in given.items()
    }
