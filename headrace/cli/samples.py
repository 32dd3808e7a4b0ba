"""`headrace data`: samples as the model will see them, with the trained parts marked.

Invariant: the samples come from the token set that training would use.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from headrace.data import DataSpec, Segment, TokenSet, length_histogram, render_samples, summarize, trained_stretches
from headrace.data.batches.held_out import split_off
from headrace.data.batches.open_data import open_tokenizer, with_lengths
from headrace.process import cache_directory
from headrace.runs import RunDirectory, RunOptions, open_tokens
from headrace.terms.errors import ConfigError

_BAR_WIDTH = 40
# Without colour, these brackets mark trained parts: they hardly occur in text.
_OPEN, _CLOSE = "\u27e6", "\u27e7"


def show_samples(source: str, changes: Mapping[str, Any], *, model: Path | None, count: int, as_json: bool) -> None:
    """Print `count` samples, the lengths and the totals of a run's data or of a file. `changes` are options by their keys.

    Raises:
        ConfigError: a file is given without a model, whose tokenizer is needed.
        InputError: the run, model or data cannot be used.
    """
    config = with_lengths(_config(source, model, changes))
    tokenizer = open_tokenizer(config.model, config.chat_template)
    tokens, spec = open_tokens(config, tokenizer)
    if config.eval_split is not None:
        tokens = dataclasses.replace(tokens, notices=split_off(tokens, config.eval_split, config.seed).notices)
    samples = render_samples(tokens, tokenizer, count)
    if as_json:
        trained = [trained_stretches(tokens, tokenizer, index) for index in range(len(samples))]
        stretches = [[dataclasses.asdict(each) for each in sample] for sample in trained]
        print(json.dumps(_values(tokens, spec, samples) | {"stretches": stretches}, ensure_ascii=False, indent=2))
        return
    console = Console(highlight=False)
    for number, segments in enumerate(samples, start=1):
        console.print(Text(f"sample {number} of {len(tokens)}", style="bold"))
        console.print(marked(segments, colour=console.is_terminal), soft_wrap=True)
        console.print()
    console.print(Text("\n".join([*(f"note: {notice}" for notice in tokens.notices), totals(tokens, spec)])), soft_wrap=True)


def marked(segments: list[Segment], *, colour: bool) -> Text:
    """Return the text of a sample with its trained parts green, or in brackets if there is no colour."""
    text = Text()
    for piece, trained in segments:
        if trained and not colour:
            text.append(f"{_OPEN}{piece}{_CLOSE}")
        else:
            text.append(piece, style="bold green" if trained else "dim")
    return text


def totals(tokens: TokenSet, spec: DataSpec) -> str:
    """Return the totals and a histogram of lengths as lines."""
    summary = summarize(tokens, spec)
    share = summary.trained_tokens / summary.tokens
    lines = [
        f"samples   {summary.samples} ({', '.join(f'{number} {kind}' for kind, number in summary.kinds.items())})",
        f"tokens    {summary.tokens}, {summary.trained_tokens} of them trained ({share:.0%})",
        f"dropped   {summary.dropped_samples} samples without a trained token",
        f"unmarked  {summary.unmarked_samples} samples skipped: refused by the chat template, or turns not found",
        f"cut       {summary.cut_tokens} tokens of {summary.cut_samples} samples beyond {spec.sequence_length}",
        f"rows      {summary.rows} of {spec.sequence_length} tokens, {summary.efficiency:.1%} filled",
        f"steps     {summary.steps_per_epoch:.1f} in an epoch, of {spec.tokens_per_step} tokens each",
        "lengths",
    ]
    bins = length_histogram(tokens)
    most = max(each.samples for each in bins)
    for each in bins:
        bar = "#" * round(_BAR_WIDTH * each.samples / most)
        lines.append(f"  {each.least_tokens:>6}-{each.most_tokens:<6} {each.samples:>8} {bar}")
    return "\n".join(lines)


def _config(source: str, model: Path | None, changes: Mapping[str, Any]) -> RunOptions:
    run = RunDirectory(Path(source))
    if run.config.exists():
        lengths: dict[str, Any] = {"tokens_per_step": None} if "sequence_length" in changes else {}
        return dataclasses.replace(run.read_config(), **changes, **lengths)
    if model is None:
        raise ConfigError(f"{source}: no run, so the tokenizer is not known; name a model directory with --model")
    return RunOptions.of({"model": model, "data": source, "cache": cache_directory(), **changes})


def _values(tokens: TokenSet, spec: DataSpec, samples: list[list[Segment]]) -> dict[str, Any]:
    return {
        "summary": dataclasses.asdict(summarize(tokens, spec)),
        "notices": list(tokens.notices),
        "lengths": [dataclasses.asdict(each) for each in length_histogram(tokens)],
        "samples": [[{"text": text, "trained": trained} for text, trained in segments] for segments in samples],
    }
