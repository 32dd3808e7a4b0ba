"""Log-probabilities of tokens, and what a request adds to scores before a token is taken.

Log-probabilities are those of the model's own logits, before penalties, biases and temperature. Each step reduces its own.
Invariant: of a prompt, logits exist for a few positions at a time; noting changes no draw.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor, StoppingCriteria

# Bytes of float32 logits of a prompt that exist at once: less than a first pass has free when its blocks have been run.
_LOGIT_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """A token, its log-probability and rank (1 is the likeliest); `top`: the likeliest tokens with theirs. None for the first
    token of a prompt, which nothing predicts.
    """

    token: int
    logprob: float | None
    rank: int = 0
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Steering:
    """What a request asks of scores. `top` and `prompt_top`: how many likeliest tokens are noted, None: nothing is; `bias` is
    added to scores of tokens. Penalties are those of OpenAI: of the number of times that a token was generated, and of any.
    """

    top: int | None = None
    prompt_top: int | None = None
    frequency: float = 0.0
    presence: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    ends: tuple[int, ...] = ()


class Scores:
    """What is noted of one row, whose prompt is `prompt`. `logits` makes logits (1, C, vocabulary) of ids and hidden states."""

    def __init__(self, steering: Steering, prompt: tuple[int, ...], logits: Callable[[Any, Any], torch.Tensor]) -> None:
        self.tokens: list[ScoredTokens] = []
        self.prompt: list[ScoredTokens] = [ScoredTokens(prompt[0], None)]
        self._steering, self._prompt, self._logits = steering, prompt, logits
        self._at, self._raw = 0, torch.empty(0, dtype=torch.float32)

    @property
    def passed(self) -> Callable[[torch.Tensor], None] | None:
        """What gets the final hidden states of each pass, if anything is to be noted of them."""
        return None if self._steering.prompt_top is None else self._take_hidden

    def processors(self, config: Any) -> list[LogitsProcessor]:
        """Return what processes scores: what notes them comes first, so the model's repetition penalty moves behind it."""
        steering, found = self._steering, list[LogitsProcessor]()
        if steering.top is not None:
            found.append(_Noting(self))
            if config.repetition_penalty not in (None, 1.0):
                found.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
                config.repetition_penalty = None
        if steering.frequency or steering.presence or steering.bias:
            found.append(_Steered(steering, len(self._prompt)))
        return found

    def criteria(self) -> list[StoppingCriteria]:
        """Return what is asked after each token: it notes which one was taken."""
        return [] if self._steering.top is None else [_TakenRows(self)]

    def note(self, scores: torch.Tensor) -> None:
        """Keep the logits of a step until its token is known."""
        self._raw = scores[0]

    def take(self, token: int) -> None:
        """Note the token of the step whose logits came."""
        self.tokens += _scored(self._raw[None], [token], self._steering.top or 0)

    def _take_hidden(self, hidden: torch.Tensor) -> None:
        """Note the tokens that follow the positions of `hidden` (1, T, hidden) in the prompt."""
        count = max(0, min(hidden.shape[1], len(self._prompt) - 1 - self._at))
        start, ids = self._at, torch.tensor([self._prompt], device=hidden.device)
        self._at += hidden.shape[1]
        place, step = 0, 1
        while place < count:
            span = slice(place, min(place + step, count))
            logits = self._logits(ids[:, start + span.start : start + span.stop], hidden[:, span])
            targets = self._prompt[start + span.start + 1 : start + span.stop + 1]
            self.prompt += _scored(logits[0], targets, self._steering.prompt_top or 0)
            place, step = span.stop, max(1, _LOGIT_BYTES // (4 * logits.shape[-1]))


class _Noting(LogitsProcessor):  # type: ignore[misc]
    def __init__(self, scores: Scores) -> None:
        self._scores = scores

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._scores.note(scores)
        return scores


class _TakenRows(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, scores: Scores) -> None:
        self._scores = scores

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._scores.take(int(input_ids[0, -1]))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class _Steered(LogitsProcessor):  # type: ignore[misc]
    """Takes penalties off the scores of tokens that were generated, and adds biases. The prompt's `length` tokens count not."""

    def __init__(self, steering: Steering, length: int) -> None:
        self._steering, self._length = steering, length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        steering, found = self._steering, scores.clone()
        tokens, counts = torch.unique(input_ids[0, self._length :], return_counts=True)
        found[0, tokens] -= (steering.frequency * counts + steering.presence).to(found.dtype)
        for token, bias in steering.bias.items():
            found[0, token] += bias
        return found


def _scored(logits: torch.Tensor, targets: Any, top: int) -> list[ScoredTokens]:
    """Return the scores of `targets` (C) under logits (C, vocabulary)."""
    found = logits.float().log_softmax(dim=-1)
    own = found.gather(-1, torch.tensor(targets, device=found.device)[:, None])
    ranks = (found > own).sum(dim=-1) + 1
    best = found.topk(top, dim=-1)
    rows = zip(targets, own[:, 0].tolist(), ranks.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    return [ScoredTokens(token, value, rank, tuple(zip(ids, values, strict=True))) for token, value, rank, ids, values in rows]
