"""The options of training, each declared once (`terms/options/declared.py` says how to add one).

`Options` has what an engine and a plan need; `RunOptions` adds what a whole run needs. Either is passed on as a whole, from the
command line or a program to the record of the run. The command line, docs/options.md and the record follow from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headrace.terms.errors import ConfigError
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.adapter import adapter_of
from headrace.terms.options.budget import Budget
from headrace.terms.options.budget_options import BudgetOptions
from headrace.terms.options.contradictions import refuse_contradictions
from headrace.terms.options.declared import Group, option
from headrace.terms.options.method_options import MethodOptions
from headrace.terms.options.named import named_text, parse_named
from headrace.terms.options.optimizer import Schedule
from headrace.terms.options.option_kinds import Either, Flag, Listed, OneOf, PathOf, PlaceOrName, Whole

_cluster = partial(option, group=Group.CLUSTER)
_run = partial(option, group=Group.RUN)
_method = partial(option, group=Group.METHOD)

DEFAULT_SEQUENCE_LENGTH = 2048
DEFAULT_ROWS_PER_STEP = 8
_MOST_SEED = (1 << 128) - 1  # as many bits as numpy draws for one


@dataclass(frozen=True, kw_only=True)
class Options(MethodOptions, BudgetOptions):  # fields of the last base come first
    """The options of an engine and its plan. Values may have the form of a YAML file: sizes such as "16GiB". Sizes are bytes,
    lengths and counts are tokens or steps. None means "choose for me".
    """

    cuts: tuple[int, ...] = _cluster(
        (),
        Listed(Whole()),
        "Blocks with which the stages after the first begin, such as 12 and 20.",
        row="with `--stages`: the block, counted from 0, with which each stage after the first begins, such as `[12, 20]`",
        words="stages with equal work",
    )
    stage_dtype: str | None = _cluster(
        None,
        OneOf(("int8",)),
        "Let hidden states and their gradients cross cuts in 8 bits, with a scale for each token.",
        row="with `--stages`: `int8` lets hidden states and their gradients cross in 8 bits, with a scale for each token",
        words="`compute_dtype`",
    )
    seed: int = option(0, Whole(0, _MOST_SEED), "Seed of the data order and of dropout.", group=Group.LEARNING)
    checkpoint_every: int | None = _run(
        None,
        Whole(),
        "Commit every so many steps, for resuming; it makes no checkpoint-N (--save-steps).",
        row="commit once in this many steps, for `resume`; `save_steps` makes directories. More than 1 pays only if states "
        "live in memory (`headrace plan` says how much). If updates do not wait for the norm, every step is committed",
        words="1",
        plan=True,
    )
    compile_blocks: bool = _method(
        False,
        Flag(),
        "Run blocks under torch.compile.",
        row="run blocks under `torch.compile`. It needs a C++ compiler (CPU) or Triton (GPU), and a model without dropout; "
        "nothing is replayed. The first step takes longer, and memory that no plan counts",
    )
    liger: bool = _method(
        False,
        Flag(),
        "Run Liger's kernels in the blocks, on a GPU.",
        row="run Liger's norms, gated products and rotations in blocks, on a GPU with `liger-kernel`; nothing is replayed",
    )
    leave_out_blocks: bool = option(
        False,
        Flag(),
        "Ignore blocks in the weight files that config.json does not declare.",
        row="ignore blocks in the weight files that `config.json` does not declare. They go into `final/` unchanged. "
        "Without this option such a model is refused",
        group=Group.DATA,
    )
    plan: str | Path | None = _run(
        None,
        PathOf(),
        "Follow this plan: a run directory, or a plan as JSON.",
        row="the directory of another run whose plan to use, or a file with the output of `headrace plan --json`. The same "
        "plan, data and seed give the same bits, even if free memory has changed",
        words="the planner's",
        plan=True,
        fixed=False,
    )
    machine: str | Ceilings | None = option(
        None,
        Either(Ceilings, PlaceOrName()),
        "Machine profile to plan for: a name such as desktop-4090 or rtx4090-4ssd, or a file.",
        row="profile of the machine to plan for: a name such as `desktop-4090` or `rtx4090-4ssd`, or a file",
        words="what was measured, if anything",
        plan=True,
        fixed=False,
        group=Group.MEMORY,
    )
    interpreter: str = _run(
        "overlapped",
        OneOf(("overlapped", "plain")),
        "Order of operations; `plain` runs one after the other.",
        row="`plain` runs one operation after the other: same bits, for tests",
        cli=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_grad_norm == 0:  # the two ways to say that nothing is clipped
            object.__setattr__(self, "max_grad_norm", None)
        length, tokens = self.sequence_length, self.tokens_per_step
        if length is not None and tokens is not None and tokens % length:
            nearest = max(1, round(tokens / length)) * length
            raise ConfigError(
                f"tokens_per_step: {tokens} is no multiple of sequence_length {length}; a step takes whole rows: use {nearest}"
            )
        if self.gradient_dtype not in (None, "float32", self.compute_dtype):
            raise ConfigError(
                f"gradient_dtype: {self.gradient_dtype!r} is neither float32 nor the compute dtype {self.compute_dtype}"
            )
        if self.adapter is not None:
            adapter = adapter_of(self.adapter)
            object.__setattr__(self, "adapter", adapter.text)
            object.__setattr__(self, "gradient_dtype", self.gradient_dtype or adapter.gradient_dtype)
        if list(self.cuts) != sorted(set(self.cuts)):
            raise ConfigError(f"cuts: {list(self.cuts)} do not rise; give the first block of each stage after the first")
        refuse_contradictions(self)
        for key in ("optimizer", "gradient"):
            object.__setattr__(self, key, named_text(*parse_named(key, getattr(self, key))))

    @property
    def budget(self) -> Budget:
        """The budget of each tier."""
        return Budget(device=self.device_memory, host=self.host_memory, ssd=self.ssd)

    @property
    def saves(self) -> bool:
        """Whether models are kept during the run, whatever becomes of them."""
        return False

    @property
    def models_at_once(self) -> int:
        """How many finished models lie beside the state at most."""
        return 1

    @property
    def schedule(self) -> Schedule:
        """The learning rate over the run's `max_steps`."""
        return Schedule(self.lr_schedule, self.warmup_steps, self.max_steps or 0)

    @classmethod
    def fixed_keys(cls) -> tuple[str, ...]:
        """Return the keys of options that a resumed run keeps as it began."""
        return tuple(each.key for each in Options.declarations() if each.fixed)

    def to_record(self) -> dict[str, Any]:
        """Return what `resume` needs besides the state, as plain JSON values: what is fixed, and the machine."""
        values = self.to_json()
        return {key: values[key] for key in (*self.fixed_keys(), "machine")}

    @staticmethod
    def from_record(values: Mapping[str, Any]) -> "Options":
        """Return the options of which `to_record` made `values`."""
        return Options.of(values, source="the run's record")
