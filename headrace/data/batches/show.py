"""What will be trained on, for people: samples with their trained parts marked, lengths, and totals. No colours, no printing.

The invariant: what is shown comes from the same token sets and rows that training takes, never from the files.
"""

from dataclasses import dataclass, fields
from itertools import groupby

import numpy as np

from headrace.data.values.packing import packed_rows
from headrace.data.values.tokens import TokenSet
from headrace.data.values.values import DataSpec, Tokenizer

Segment = tuple[str, bool]
"""A piece of text, and whether the model is trained to write it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Totals of a data set. `efficiency` is the share of the positions of an epoch's `rows` that hold a token.

    `kinds` counts the samples that were read, by their columns. `dropped_samples` had nothing to train on, `cut_tokens` were
    beyond the sequence length. `unmarked_samples` were left out: the chat template
    refuses them, or the assistant's turns cannot be found.
    """

    samples: int
    dropped_samples: int
    unmarked_samples: int
    tokens: int
    trained_tokens: int
    cut_samples: int
    cut_tokens: int
    longest_tokens: int
    rows: int
    steps_per_epoch: float
    efficiency: float
    kinds: dict[str, int]


@dataclass(frozen=True, slots=True)
class LengthBin:
    """`samples` samples have from `least_tokens` to `most_tokens` tokens, both included."""

    least_tokens: int
    most_tokens: int
    samples: int


def render_samples(tokens: TokenSet, tokenizer: Tokenizer, count: int, *, start: int = 0) -> list[list[Segment]]:
    """Return the text of `count` samples from `start` on as segments. Special tokens are spelled out."""
    return [_segments(tokens, tokenizer, index) for index in range(start, min(start + count, len(tokens)))]


@dataclass(frozen=True, slots=True)
class Trained:
    """A stretch of a sample that is trained: its text, and its tokens from `begin` up to, and without, `end`."""

    text: str
    begin: int
    end: int


def trained_stretches(tokens: TokenSet, tokenizer: Tokenizer, index: int) -> list[Trained]:
    """Return the stretches of sample `index` that are trained, in order."""
    texts = (text for text, trained in _segments(tokens, tokenizer, index) if trained)
    edges = np.flatnonzero(np.diff(tokens.sample(index).trained, prepend=False, append=False)).tolist()
    return [Trained(text, begin, end) for text, begin, end in zip(texts, edges[::2], edges[1::2], strict=True)]


def summarize(tokens: TokenSet, spec: DataSpec) -> Summary:
    """Return the totals of `tokens` as `spec` lays them out in epoch 0."""
    info = tokens.info
    lengths = tokens.lengths
    rows = len(tokens)
    # Rows that are not packed are padded to the longest of their batch, but a budget has to provide for full rows.
    if spec.packing:
        rows = len(packed_rows(lengths, spec.sequence_length, seed=spec.seed if spec.shuffle else None, epoch=0))
    return Summary(
        **{each.name: getattr(info, each.name) for each in fields(Summary) if hasattr(info, each.name)},
        longest_tokens=int(lengths.max()),
        rows=rows,
        steps_per_epoch=rows / spec.rows_per_step,
        efficiency=info.tokens / (rows * spec.sequence_length),
    )


def length_histogram(tokens: TokenSet, num_bins: int = 10) -> list[LengthBin]:
    """Return at most `num_bins` bins of equal width (the last may be narrower) from 1 token to the longest sample."""
    lengths = tokens.lengths
    longest = int(lengths.max())
    width = -(-longest // num_bins)
    counts = np.bincount((lengths - 1) // width)
    return [LengthBin(i * width + 1, min((i + 1) * width, longest), int(count)) for i, count in enumerate(counts)]


def _segments(tokens: TokenSet, tokenizer: Tokenizer, index: int) -> list[Segment]:
    sample = tokens.sample(index)
    ids = sample.input_ids.tolist()
    segments: list[Segment] = []
    shown = stop = 0
    for trained, run in groupby(sample.trained.tolist()):
        stop += len(list(run))
        # Decoded from the start each time, because a piece that is decoded alone loses the blank before a word.
        text = str(tokenizer.decode(ids[:stop], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        segments.append((text[shown:], trained))
        shown = len(text)
    return segments
