"""Options of a node whose learners train by themselves, and meet now and then."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headrace.terms.errors import ConfigError
from headrace.terms.options.declared import Declared, Group, option
from headrace.terms.options.named import named_text, parse_named
from headrace.terms.options.option_kinds import Number, OneOf, PathOf, Text, Whole

_cluster = partial(option, group=Group.CLUSTER)

# What a node without a GPU cannot do between merges, and what to do instead.
_NOT_HERE = {
    "eval_split": "measure held-out loss of final/ with headrace eval",
    "eval_data": "measure held-out loss of final/ with headrace eval",
    "save_steps": "leave it out; headrace export writes the model of the last merge",
    "save_total_limit": "leave it out; headrace export writes the model of the last merge",
    "loss": "leave it out, or train on one machine",
    "report_to": "leave it out; metrics.jsonl has a line for each merge",
    "plan": "leave it out; each learner plans for its own machine",
}
_ALONE = ("quorum", "outer", "outer_learning_rate", "exchange_dtype", "replay")


@dataclass(frozen=True, kw_only=True)
class LocalOptions(Declared):
    """How learners of a node train by themselves. Without `local_steps` they do not: workers compute each step together."""

    local_steps: int | None = _cluster(
        None,
        Whole(),
        "Let learners train by themselves, and merge what they learned every so many steps (DiLoCo).",
        row="let learners train by themselves, and merge what they learned every so many steps of theirs",
        words="workers compute each step together",
    )
    quorum: int = _cluster(
        1,
        Whole(1, 4096),
        "Learners whose changes a merge waits for.",
        row="with `local_steps`: learners whose changes a merge waits for; others have `grace` seconds more",
        fixed=False,
    )
    outer: str = _cluster(
        "sgd:momentum=0.9,nesterov=true",
        Text(),
        "Update rule of merges, as in --optimizer.",
        row="with `local_steps`: the update rule of merges, as in `optimizer`",
    )
    outer_learning_rate: float = _cluster(
        0.7,
        Number(),
        "Learning rate of merges.",
        row="with `local_steps`: learning rate of merges; 1 takes the mean of what was learned",
    )
    exchange_dtype: str = _cluster(
        "bfloat16",
        OneOf(("bfloat16", "int8")),
        "Numbers in which changes travel; int8 halves the bytes.",
        row="with `local_steps`: numbers in which changes travel. `int8` halves the bytes; what rounding leaves is sent with "
        "the next change",
    )
    replay: Path | None = _cluster(
        None,
        PathOf(),
        "Take the same merges again: merges.jsonl of another run.",
        row="with `local_steps`: `merges.jsonl` of another run, whose merges are taken again, with the same bits",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "outer", named_text(*parse_named("outer", self.outer)))
        if self.local_steps is None:
            self._refuse_without()
        else:
            self._refuse_with()

    def _refuse_without(self) -> None:
        for each in self.declarations():
            if each.key in _ALONE and getattr(self, each.key) != each.default:
                raise ConfigError(f"{each.key}: only a run with local_steps has it; give local_steps, or leave it out")

    def _refuse_with(self) -> None:
        given: dict[str, Any] = vars(self)
        for key, instead in _NOT_HERE.items():
            if given.get(key):
                raise ConfigError(f"{key}: a node with local_steps cannot do that; {instead}")
        if "from=" in str(given.get("adapter") or "").replace(" ", ""):
            raise ConfigError("adapter: from: a node with local_steps cannot do that; merge the adapter into the model first")
        if given.get("workers", 1) != 1:
            raise ConfigError("workers: with local_steps any number of learners may come; give quorum for the least of a merge")
