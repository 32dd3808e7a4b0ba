"""Calibration data: rows that calibrate the rounding, and rows that only measure the loss.

Invariant: no held-out row is among those that calibrate. In calibrating rows padding, special tokens and words that the chat
template adds do not count. But the first token of each sample always counts, because heads attend to it when they have nothing
to say. Weights that are rounded without it lose the model (docs/log/four-bits).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.compress.verbs import DataRows
from headrace.data import BatchStream
from headrace.data.batches.open_data import open_tokens, step_tensors_of, tokenizer_for_data, with_lengths
from headrace.model import IGNORED, Chain, MicroBatch
from headrace.terms.errors import DataError
from headrace.terms.options.compress_options import CompressOptions
from headrace.terms.options.run_options import RunOptions

_MICRO_BATCH_TOKENS = 4096
# At most one row in so many is held out.
_HELD_OUT_SHARE = 4


@dataclass(frozen=True, slots=True)
class CalibrationData:
    """Micro-batches, calibrating ones first; `digest` is that of the samples in them.

    `template_date` is the day that the chat template got; None where it does not ask.
    """

    rows: tuple[DataRows, ...]
    digest: str
    sequence_length: int
    template_date: str | None = None


def open_calibration(options: CompressOptions, chain: Chain, say: Callable[[str], None]) -> CalibrationData:
    """Read, tokenise and divide the data of `options` for the model of `chain`.

    Raises:
        DataError: there are too few rows, or fewer tokens than the widest matrix has inputs; or see `open_tokens`.
    """
    config = RunOptions(
        model=options.model,
        data=options.data,
        sequence_length=options.sequence_length,
        template_date=options.template_date,
        seed=options.seed % (1 << 63),
        cache=options.cache,
    )
    config = with_lengths(config)
    length = config.sequence_length or 0
    config = replace(config, tokens_per_step=length, packing=chain.packs(length))
    tokenizer = tokenizer_for_data(options.model)
    templated = bool(getattr(tokenizer, "chat_template", None))
    tokens, spec = open_tokens(config, tokenizer, contents=templated)
    stream = BatchStream(tokens, spec)
    for notice in stream.notices:
        say(notice)
    available = round(stream.steps_per_epoch)
    held_out = min(options.held_out_rows, max(1, available // _HELD_OUT_SHARE))
    calibrating = min(options.calibration_rows, available - held_out)
    if calibrating < 1:
        raise DataError(
            f"{', '.join(options.data)}: holds {available} row of {length} tokens; one must calibrate and one measure: give "
            "more data, or a smaller sequence_length"
        )
    marks = torch.tensor(sorted(set(getattr(tokenizer, "all_special_ids", ()) or ())), dtype=torch.int64)
    found = [_row(stream, marks, templated) for _ in range(calibrating + held_out)]
    rows = _joined(found[:calibrating], length, held_out=False) + _joined(found[calibrating:], length, held_out=True)
    counted = sum(int(each.counts.sum()) for each in rows if not each.held_out)
    widest = max((spec.shape[-1] for unit in chain.layouts[1:] for spec in unit.parameters if len(spec.shape) > 1), default=1)
    if counted < widest:
        raise DataError(
            f"{', '.join(options.data)}: calibration is too short: {counted} tokens in {calibrating} rows of {length} "
            f"(without padding, chat template and special tokens). A matrix has {widest} inputs; give at least as many "
            "tokens, better 100 times as many"
        )
    return CalibrationData(tuple(rows), tokens.info.digest, length, spec.template_date)


def _row(stream: BatchStream, marks: torch.Tensor, templated: bool) -> tuple[dict[str, Any], torch.Tensor]:
    tensors = step_tensors_of(stream.next_batch())
    ids = tensors["input_ids"]
    counts = ~torch.isin(ids, marks)
    if templated:  # labels mark what is said
        counts &= tensors["labels"] != IGNORED
    counts |= tensors["position_ids"] == 0 if "position_ids" in tensors else torch.arange(ids.shape[1]) == 0
    for mask in ("attention_mask", "token_mask"):
        if mask in tensors:
            counts &= tensors[mask] != 0
    return tensors, counts


def _joined(found: list[tuple[dict[str, Any], torch.Tensor]], length: int, *, held_out: bool) -> list[DataRows]:
    """Return rows of one length, joined several at a time."""
    most, rows = max(1, _MICRO_BATCH_TOKENS // length), []
    while found:
        size = found[0][1].shape[1]
        number = 1
        while number < min(most, len(found)) and found[number][1].shape[1] == size:
            number += 1
        some, found = found[:number], found[number:]
        tensors = {name: torch.cat([each[name] for each, _ in some]) for name in some[0][0]}
        rows.append(DataRows(MicroBatch(**tensors), torch.cat([counts for _, counts in some]), held_out))
    return rows
