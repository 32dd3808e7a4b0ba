"""Reads the answers of a micro-batch while transformers generates them: what stops a row, and what of its text can be shown.

Invariant: no draw changes. A row ends after the token with which a text that stops it is there. One whose logits are not finite
ends alone, and says so. Texts are looked for in answers alone; transformers' own `stop_strings` sees prompts, too.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from headrace.data.chat.answer_text import AnswerText
from headrace.generate.passes.opened import end_tokens
from headrace.generate.uses.scores import Scores

_WATCH = "stopping_criteria"


class Watch(StoppingCriteria):  # type: ignore[misc]
    """Watches rows whose prompts, filled up, have `length` tokens. `write` gets the first row's text, piece by piece.

    `failed` has the number of the token whose logits were not finite, by prompt.
    """

    def __init__(
        self, settings: Mapping[str, Any], rows: int, length: int, write: Callable[[str], None] | None, special: bool
    ) -> None:
        config = settings["generation_config"]
        stops = config.stop_strings or ()
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        self._ends, self._tokenizer = end_tokens(config), settings["tokenizer"]
        self._has_beams = (config.num_beams or 1) > 1
        self._rows, self._length = rows, length
        self._write = None if self._has_beams else write
        self._text = partial(AnswerText, self._tokenizer, self._stops, special=special)
        self._texts = [self._text() for _ in range(rows)]
        self._over = [False] * rows
        self.failed: dict[int, int] = {}

    @property
    def streams(self) -> bool:
        """Whether text goes to `write` as it comes; answers of beams come whole."""
        return self._write is not None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return which rows end here."""
        each = max(1, input_ids.shape[0] // self._rows)
        if self._stops or self._write is not None:
            ended = [self._ended(row, tokens) for row, tokens in enumerate(input_ids[:, self._length :].tolist())]
        else:
            ended = [False] * input_ids.shape[0]
        if not self._has_beams:
            last = input_ids[:, -1].tolist()
            self._over = [
                over or end or last[row] in self._ends for row, (over, end) in enumerate(zip(self._over, ended, strict=True))
            ]
        found = [end or row // each in self.failed for row, end in enumerate(ended)]
        return torch.tensor(found, dtype=torch.bool, device=input_ids.device)

    def note(self, input_ids: torch.Tensor, wrong: torch.Tensor) -> None:
        """Note rows whose logits are `wrong`; those that are over already do not count."""
        each = max(1, wrong.shape[0] // self._rows)
        for row in wrong.nonzero().flatten().tolist():
            if self._has_beams or not self._over[row]:
                self.failed.setdefault(row // each, input_ids.shape[1] - self._length + 1)

    def finish(self, row: int, tokens: tuple[int, ...]) -> AnswerText:
        """Return the answer of a prompt, of which `tokens` are all; the rest of its text is written."""
        found = self._text() if self._has_beams else self._texts[row]
        found.add(tokens[found.count :])
        if self._write is not None and row not in self.failed and (rest := found.rest()):
            self._write(rest)
        return found

    def _ended(self, row: int, tokens: list[int]) -> bool:
        if self._has_beams:  # rows change places
            found = self._text()
            found.add(tokens)
            return found.stopped
        found = self._texts[row]
        if not self._over[row] and row not in self.failed:
            found.add(tokens[found.count :])
            if self._write is not None and (piece := found.certain()):
                self._write(piece)
        return found.stopped


class _Finite(LogitsProcessor):  # type: ignore[misc]
    """Tells the watch of rows without a finite largest logit, and gives these others that can be drawn from."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores that are finite."""
        wrong = ~scores.amax(dim=-1).isfinite()  # NaN is larger than any number
        if not wrong.any():
            return scores
        self._watch.note(input_ids, wrong)
        return scores.masked_fill(wrong[:, None], 0.0)


def watched(
    settings: Mapping[str, Any],
    rows: tuple[tuple[int, ...], ...],
    write: Callable[[str], None] | None = None,
    *more: StoppingCriteria,
    special: bool = False,
    scores: Scores | None = None,
) -> dict[str, Any]:
    """Return the arguments of `generate` for `rows`, which are watched; `more` end them, too. Texts have `special` tokens;
    `scores` notes and steers what is drawn.
    """
    config = copy.copy(settings["generation_config"])
    watch = Watch(settings, len(rows), max(map(len, rows)), write, special)
    config.stop_strings = None
    noted = [] if scores is None else scores.criteria()  # before the watch tells of a text, whose tokens it has then
    steered = [] if scores is None else scores.processors(config)
    processors = LogitsProcessorList([*steered, _Finite(watch)])
    added = {_WATCH: StoppingCriteriaList([*noted, watch, *more]), "logits_processor": processors}
    return {**settings, "generation_config": config, **added}


def watch_of(settings: Mapping[str, Any]) -> Watch:
    """Return who watches the rows of these arguments, which `watched` made."""
    return next(each for each in settings[_WATCH] if isinstance(each, Watch))
