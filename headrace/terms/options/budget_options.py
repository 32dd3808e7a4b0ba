"""Options of a run's size: where its state lies, what it may take, how large its steps are, and how many."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.terms.options.declared import Declared, Group, option
from headrace.terms.options.option_kinds import Listed, PathOf, Size, Whole

_memory = partial(option, plan=True, group=Group.MEMORY)
_learning = partial(option, plan=True, group=Group.LEARNING)


@dataclass(frozen=True, kw_only=True)
class BudgetOptions(Declared):
    """Where a run lies, what it may take, and how much it does. Sizes are bytes, lengths are tokens, None: choose for me."""

    output: str | Path | None = option(
        None,
        PathOf(),
        "Run directory to write; it must not exist yet.",
        row="run directory; refused if it is not empty",
        words="`runs/MODEL-DATA`",
        plan=True,
        fixed=False,
        group=Group.RUN,
    )
    ssd: str | Path | Sequence[str | Path] = _memory(
        (),
        Listed(PathOf()),
        "Directory on an SSD for the training state; give it several times to stripe.",
        row="directories for the state. Several are striped by their measured speed. A tenth of the free space stays free",
        words="run directory",
        fixed=False,
        often=True,
    )
    host_memory: str | int | None = _memory(
        None,
        Size(),
        "Main memory that the process may use, such as 16GiB.",
        row="bytes this process may use, Python and libraries included. The default respects control groups and resource "
        "limits, and counts page cache as free. Under WSL with a GPU it is at most half of memory",
        words="70 % of what this process may still take",
        often=True,
    )
    device_memory: str | int | None = _memory(
        None,
        Size(),
        "GPU memory that the process may use; without a GPU, a device tier of that size.",
        row="without a GPU, a value makes a separate device tier inside host memory (for tests)",
        words="90 % of what is free on the GPU",
        often=True,
    )
    sequence_length: int | None = option(
        None,
        Whole(2),
        "Tokens of one row; longer samples are cut.",
        words="2048 or the model's limit",
        plan=True,
        group=Group.DATA,
        often=True,
    )
    tokens_per_step: int | None = _learning(
        None,
        Whole(),
        "Tokens of one optimizer step.",
        row="tokens of one optimizer step; costs SSD space for activations, and the hidden states of one block in memory",
        words="8 rows",
        often=True,
    )
    max_steps: int | None = _learning(
        None,
        Whole(),
        "Number of steps; wins over epochs.",
        row="length of the run; wins over `epochs`",
        words="by `epochs`",
        often=True,
    )
