"""The options of compressing a model, each declared once (`terms/declared.py` says how to add one)."""

from dataclasses import dataclass
from pathlib import Path

from headrace.terms.declared import Declared, option, option_as
from headrace.terms.option_kinds import Flag, Listed, Number, Place, PlaceOrName, Text, Whole
from headrace.terms.run_options import RunOptions


@dataclass(frozen=True, kw_only=True)
class CompressOptions(Declared):
    """What `headrace compress` works by. Sizes are bytes, lengths are tokens. None stands for "choose for me"."""

    model: Path = option(kind=Place(), help="Model directory.", row="model directory", cli=False)
    output: Path = option(kind=Place(), help="Directory to write; must not exist.", row="directory to write", cli=False)
    to: str = option(
        kind=Text(),
        help="Code for the weights, such as int4.",
        row="code for the weights, such as `int4`: one that [codes](docs/codes.md) has as written",
    )
    data: tuple[str, ...] = option(
        kind=Listed(PlaceOrName(), 1),
        help="Calibration data; may be given twice.",
        row="calibration data, as for training: inputs of matrices are taken from part of it, held-out loss from the rest",
    )
    experts_only: bool = option(False, Flag(), "Leave all but experts as they are.", row="code the matrices of experts alone")
    most_loss: float | None = option(
        None,
        Number(),
        "Refuse a result whose held-out loss rises more than this.",
        row="write nothing where held-out loss rises by more than this, in nats per token",
        words="no limit",
    )
    group_size: int = option(
        128,
        Whole(8, 1 << 16),
        "Columns that share a scale, where a code has such scales.",
        row="columns that share a scale, where a code has such scales; a matrix whose width it does not divide gets half as "
        "many, down to 32",
    )
    sequence_length: int | None = option_as(RunOptions, "sequence_length")
    template_date: str | None = option_as(
        RunOptions, "template_date", row="the day, YYYY-MM-DD, that a chat template gets which asks for the date"
    )
    calibration_rows: int = option(128, Whole(), "Rows that calibrate.")
    held_out_rows: int = option(
        32,
        Whole(),
        "Rows that only measure.",
        row="rows that only measure the loss, before and after; a quarter of all at most",
    )
    host_memory: int | None = option_as(
        RunOptions,
        "host_memory",
        row="bytes this process may use; if the sums over inputs of all experts do not fit, rows pass a block several times",
    )
    compute_dtype: str = option_as(RunOptions, "compute_dtype", row="dtype of hidden states; or `float32`, `float16`")
    seed: int = option(0, Whole(0), "Which rows calibrate.")
    cache: Path = option_as(RunOptions, "cache", row="")
