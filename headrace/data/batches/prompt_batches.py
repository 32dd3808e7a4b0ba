"""Batches of prompts, for losses whose rows the model writes itself: a batch says which prompts a step has.

Invariants: those of `batches.py`. All prompts are in memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.data.chat.prompts import Prompts
from headrace.data.pairs.preferences import read
from headrace.data.read.sources import find_sources
from headrace.data.values.values import Batch, DataSpec
from headrace.terms.errors import ConfigError, DataError
from headrace.terms.options.data_source import DataSource
from headrace.terms.options.preferences import Preferences
from headrace.terms.packed_rows import PackedRows

_ORDER = "randperm"  # of which a run's position tells; runs that began before it keep numpy's permutations


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: its tokens, what it was as data (a text, or messages), and all other columns of the data: None where its sample
    lacks one.
    """

    ids: tuple[int, ...]
    text: Any
    columns: Mapping[str, Any]


def read_prompts(
    entries: Sequence[str | DataSource], cache: Path, prompts: Prompts, most_tokens: int
) -> tuple[list[Prompt], int]:
    """Return the prompts of all sources that have at most `most_tokens`, and how many have more.

    Raises:
        DataError: a sample has no prompt, or it cannot be read; or all prompts are too long.
    """
    found, lengths, names = list[Prompt](), list[int](), dict[str, None]()
    for source in find_sources(entries, cache, every=Preferences.PROMPTS.value.every):
        for row in read(source, Preferences.PROMPTS)[1]:
            given = row.values["prompt"]
            try:
                ids = prompts.of_text(given) if isinstance(given, str) else prompts.to_answer(given)
            except DataError as error:
                raise DataError(f"{row.place}: {error}") from error
            if len(ids) > most_tokens:
                lengths.append(len(ids))
                continue
            columns = {name: value for name, value in row.values.items() if name != "prompt"}
            names |= dict.fromkeys(columns)
            found.append(Prompt(tuple(ids), given, columns))
    if not found:
        raise DataError(
            f"data: all {len(lengths)} prompts are too long: the shortest has {min(lengths)} tokens, and beside a completion "
            f"there is room for {most_tokens}; give a longer sequence_length"
        )
    return [replace(each, columns={name: each.columns.get(name) for name in names}) for each in found], len(lengths)


class PromptBatches:
    """`Batches` of `prompts`, so many a step. If the data are shuffled, each epoch has another order: that of TRL's sampler."""

    held_out = None
    by_earlier_rules = False
    left_out = ()

    def __init__(self, prompts: Sequence[Prompt], spec: DataSpec, generations: int, too_long: int) -> None:
        """Start at the first prompt. A prompt takes `generations` rows of a step.

        Raises:
            ConfigError: a step has no whole number of them.
        """
        if not spec.rows_per_step or spec.rows_per_step % generations:
            raise ConfigError(
                f"tokens_per_step: a step has {spec.rows_per_step} rows of {spec.sequence_length} tokens, no multiple of "
                f"num_generations={generations}; give {generations * spec.sequence_length}, or a multiple of it"
            )
        self.prompts, self._spec, self._too_long = tuple(prompts), spec, too_long
        self._per_step, self._taken = spec.rows_per_step // generations, 0
        self._dice, self._epoch, self._order = torch.Generator().manual_seed(spec.seed), -1, list[int]()
        self._by_earlier_order = False
        self.columns = tuple(self.prompts[0].columns)  # the same for all

    @property
    def spec(self) -> DataSpec:
        """What the data were asked for."""
        return self._spec

    @property
    def template_date(self) -> str | None:
        """The day that the chat template was told; None if it does not ask."""
        return self._spec.template_date

    @property
    def notices(self) -> tuple[str, ...]:
        """Notes for the person who trains on the data."""
        longer = (
            f"{self._too_long} of {self._too_long + len(self.prompts)} prompts are left out: they leave no room for an answer"
        )
        memory = "half of the memory is for the steps, half for the process that generates"
        return (memory, longer) if self._too_long else (memory,)

    @property
    def steps_per_epoch(self) -> float:
        """Steps of an epoch."""
        return len(self.prompts) / self._per_step

    def epochs_ended(self, steps: int) -> int:
        """Return how many epochs end within so many steps."""
        return steps * self._per_step // len(self.prompts)

    def first_rows(self, steps: int) -> PackedRows:
        """Return no rows: nothing is packed."""
        return PackedRows(self._spec.sequence_length)

    def next_batch(self) -> Batch:
        """Return a batch whose `samples` are the next step's prompts; its rows are still to be written."""
        numbers = [self._number(place) for place in range(self._taken, self._taken + self._per_step)]
        self._taken += self._per_step
        nothing = np.zeros((0, 0), np.int64)
        return Batch(
            input_ids=nothing,
            labels=nothing,
            position_ids=None,
            attention_mask=None,
            token_mask=None,
            num_tokens=0,
            num_trained_tokens=0,
            samples=np.array(numbers, np.int64),
        )

    def state(self) -> dict[str, Any]:
        """Return the position: how many prompts were taken, of how many."""
        order = {} if self._by_earlier_order else {"order": _ORDER}
        return {"taken": self._taken, "prompts": len(self.prompts)} | order

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to the position where `state` was taken.

        Raises:
            DataError: there were other prompts.
        """
        if state.get("prompts") != len(self.prompts):
            raise DataError(
                f"data: {len(self.prompts)} prompts, and the run began with {state.get('prompts')}; restore the files"
            )
        self._taken, self._by_earlier_order = int(state["taken"]), state.get("order") != _ORDER

    def _number(self, place: int) -> int:
        epoch, within = divmod(place, len(self.prompts))
        if not self._spec.shuffle:
            return within
        if self._by_earlier_order:
            return int(np.random.default_rng((self._spec.seed, epoch)).permutation(len(self.prompts))[within])
        if epoch < self._epoch:
            self._dice, self._epoch = self._dice.manual_seed(self._spec.seed), -1
        while self._epoch < epoch:  # one generator draws the orders of all epochs
            self._order, self._epoch = torch.randperm(len(self.prompts), generator=self._dice).tolist(), self._epoch + 1
        return self._order[within]
