"""The options of compressing a model, each declared once (`terms/options/declared.py` says how to add one)."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.terms.options.declared import Declared, Group, option, option_as
from headrace.terms.options.option_kinds import Flag, Listed, Number, PathOf, PlaceOrName, Text, Whole
from headrace.terms.options.run_options import RunOptions

_result = partial(option, group=Group.RESULT)
_calibration = partial(option, group=Group.CALIBRATION)


@dataclass(frozen=True, kw_only=True)
class CompressOptions(Declared):
    """What `headrace compress` works by. Sizes are bytes, lengths are tokens. None stands for "choose for me"."""

    model: Path = option(kind=PathOf(), help="Model directory.", row="model directory", cli=False, group=Group.DATA)
    output: Path = option(
        kind=PathOf(), help="Directory to write; must not exist.", row="directory to write", cli=False, group=Group.RUN
    )
    to: str = _result(
        kind=Text(),
        help="Code for the weights, such as int4.",
        row="code for the weights, such as `int4`: one that [codes](compress.md) has as written",
        often=True,
    )
    data: tuple[str, ...] = _calibration(
        (),
        Listed(PlaceOrName(), 0),
        "Calibration data; may be given twice.",
        row="calibration data, as for training: inputs of matrices are taken from part of it, held-out loss from the rest. "
        "Codes that [lose nothing](compress.md) take none",
        words="-",
        often=True,
    )
    experts_only: bool = _result(
        False, Flag(), "Compress only the experts of a mixture.", row="code the matrices of experts alone"
    )
    most_loss: float | None = _result(
        None,
        Number(),
        "Write nothing if held-out loss rises by more than this.",
        row="write nothing where held-out loss rises by more than this, in nats per token",
        words="no limit",
        often=True,
    )
    group_size: int = _result(
        128,
        Whole(8, 1 << 16),
        "Columns that share a scale, where a code has such scales.",
        row="columns that share a scale, if a code has such scales. A matrix gets half as many, down to 32, if they do not "
        "divide its width",
    )
    sequence_length: int | None = option_as(RunOptions, "sequence_length", group=Group.CALIBRATION, often=False)
    template_date: str | None = option_as(
        RunOptions,
        "template_date",
        row="the day, YYYY-MM-DD, for chat templates that ask for the date",
        group=Group.CALIBRATION,
    )
    calibration_rows: int = _calibration(128, Whole(), "Number of rows that calibrate.")
    held_out_rows: int = _calibration(
        32,
        Whole(),
        "Number of rows that only measure the loss.",
        row="rows that only measure the loss, before and after; a quarter of all at most",
    )
    host_memory: int | None = option_as(
        RunOptions,
        "host_memory",
        row="bytes this process may use; if the sums over inputs of all experts do not fit, rows pass a block several times",
        group=Group.MEMORY,
        often=True,
    )
    compute_dtype: str = option_as(
        RunOptions,
        "compute_dtype",
        row="dtype of hidden states; or `float32`, `float16`",
        group=Group.MEMORY,
        often=False,
        help="Dtype of the hidden states: bfloat16, float32 or float16.",
    )
    seed: int = _calibration(0, Whole(0), "Seed that chooses the rows that calibrate.")
    cache: Path = option_as(RunOptions, "cache", row="", group=Group.CALIBRATION, often=False)
