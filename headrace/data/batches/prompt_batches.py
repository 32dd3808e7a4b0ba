"""Batches of prompts, for losses whose rows the model writes itself: a batch says which prompts a step has.

Invariants: those of `batches.py`. All prompts are in memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.data.batches.batches import Batches, Cursor, Epoch
from headrace.data.chat.prompts import Prompts
from headrace.data.pairs.preferences import read
from headrace.data.read.sources import find_sources
from headrace.data.values.packing import EpochRows
from headrace.data.values.values import Batch, DataSpec
from headrace.terms.errors import ConfigError, DataError
from headrace.terms.options.data_source import DataSource
from headrace.terms.options.preferences import Preferences

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


class PromptBatches(Batches):
    """`Batches` of `prompts`, so many a step. If the data are shuffled, each epoch has another order: that of TRL's sampler."""

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
        super().__init__(spec, None, spec.rows_per_step // generations, len(prompts))
        self.prompts, self._too_long = tuple(prompts), too_long
        self._by_earlier_order = False
        self._cursor = Cursor[Epoch](lambda last: self._epoch(last.number + 1 if last else 0))
        self.columns = tuple(self.prompts[0].columns)  # the same for all

    @property
    def notices(self) -> tuple[str, ...]:
        """Notes for the person who trains on the data."""
        longer = (
            f"{self._too_long} of {self._too_long + len(self.prompts)} prompts are left out: they leave no room for an answer"
        )
        memory = "half of the memory is for the steps, half for the process that generates"
        return (memory, longer) if self._too_long else (memory,)

    def next_batch(self) -> Batch:
        """Return a batch whose `samples` are the next step's prompts; its rows are still to be written."""
        nothing = np.zeros((0, 0), np.int64)
        numbers = np.concatenate([row for _, row in self._cursor.take(self._step_rows)])
        return Batch(input_ids=nothing, labels=nothing, samples=numbers)

    def state(self) -> dict[str, Any]:
        """Return the position: how many prompts were taken, of how many."""
        order = {} if self._by_earlier_order else {"order": _ORDER}
        taken = self._cursor.stretch.number * len(self.prompts) + self._cursor.row_index
        return {"taken": taken, "prompts": len(self.prompts)} | order

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to the position where `state` was taken.

        Raises:
            DataError: there were other prompts.
        """
        if state.get("prompts") != len(self.prompts):
            raise DataError(
                f"data: {len(self.prompts)} prompts, and the run began with {state.get('prompts')}; restore the files"
            )
        self._by_earlier_order = state.get("order") != _ORDER
        epoch, within = divmod(int(state["taken"]), len(self.prompts))
        self._cursor.go_to(self._epoch(epoch), within)

    def _epoch(self, number: int) -> Epoch:
        """Return an epoch's prompts, one a row."""
        count, seed = len(self.prompts), self.spec.seed
        order = np.arange(count)
        if self.spec.shuffle and self._by_earlier_order:
            order = np.random.default_rng((seed, number)).permutation(count)
        elif self.spec.shuffle:
            dice = torch.Generator().manual_seed(seed)
            for _ in range(number + 1):  # one generator draws the orders of all epochs
                order = torch.randperm(count, generator=dice).numpy()
        return Epoch(EpochRows(order, np.arange(count + 1)), number)
