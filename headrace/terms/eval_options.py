"""The options of measuring a model's loss, each declared once (`terms/declared.py` says how to add one)."""

from dataclasses import dataclass
from pathlib import Path

from headrace.terms.budget import Budget
from headrace.terms.ceilings import Ceilings
from headrace.terms.declared import Declared, option
from headrace.terms.option_kinds import Either, Flag, Listed, OneOf, Place, Size, Text, Whole
from headrace.terms.options import DTYPE_NAMES


@dataclass(frozen=True, kw_only=True)
class EvalOptions(Declared):
    """What `headrace eval` works by. Sizes are bytes, lengths are tokens. None stands for "choose for me"."""

    data: tuple[str, ...] = option(
        kind=Listed(Text(), 1),
        help="Data that was held out; may be given twice.",
        row="one or more files, as for training: samples are marked, cut and packed as there",
    )
    sequence_length: int | None = option(None, Whole(2), "Tokens of one row.", words="2048 or the model's limit")
    packing: bool | None = option(
        None, Flag(), "Several samples in one row, without seeing one another.", words="where the model can"
    )
    host_memory: str | int | None = option(
        None, Size(), "Main memory the process may use, such as 16GiB.", words="70 % of what this process may still take"
    )
    device_memory: str | int | None = option(
        None,
        Size(),
        "GPU memory; without a GPU, a device tier of that size.",
        row="bytes on the GPU; without a GPU, a device tier of that size",
        words="90 % of what is free on the GPU",
    )
    compute_dtype: str | None = option(
        None,
        OneOf(("bfloat16", "float32", "float16"), DTYPE_NAMES),
        "bfloat16, float32 or float16.",
        words="that of most weights",
    )
    rows: int | None = option(None, Whole(), "Rows of a micro-batch.", words="planned")
    seats: int | None = option(None, Whole(1, 64), "Micro-batches that go through the model together.", words="planned")
    machine: str | Ceilings | None = option(
        None,
        Either(Ceilings, Text()),
        "Machine profile: a name such as rtx4090-4ssd, or a file.",
        row="profile by which the plan is chosen: a name such as `rtx4090-4ssd`, or a file",
        words="what was measured, if anything",
    )
    cache: Path = option(
        kind=Place(),
        help="Tokenised data.",
        words="`~/.cache/headrace`",
        cli=False,
        factory=lambda: Path.home() / ".cache" / "headrace",
    )

    @property
    def budget(self) -> Budget:
        """The budget of each tier."""
        return Budget(device=self.device_memory, host=self.host_memory)
