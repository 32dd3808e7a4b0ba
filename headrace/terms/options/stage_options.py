"""Options of a run whose blocks lie on several machines, in stages."""

from dataclasses import dataclass
from functools import partial

from headrace.terms.errors import ConfigError
from headrace.terms.options.declared import Declared, Group, option
from headrace.terms.options.option_kinds import Listed, OneOf, Whole

_cluster = partial(option, group=Group.CLUSTER)


@dataclass(frozen=True, kw_only=True)
class StageOptions(Declared):
    """How a run with `--stages` is cut, and what crosses its cuts."""

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.cuts) != sorted(set(self.cuts)):
            raise ConfigError(f"cuts: {list(self.cuts)} do not rise; give the first block of each stage after the first")
