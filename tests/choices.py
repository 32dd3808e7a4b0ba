"""The choices of a run, axis by axis, those that are refused together, and the part of docs/features.md that says so.

`PYTHONPATH=tests python tests/choices.py` writes it anew.

Values come from where they are declared (rules, ways for gradients, adapters), so that a new one is in the table.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pages import renew

from headrace.terms.errors import ConfigError
from headrace.terms.layout import COMPUTE_DTYPES
from headrace.terms.options.adapter import ADAPTERS
from headrace.terms.options.declared import Declaration
from headrace.terms.options.optimizer import ALL, MATRICES
from headrace.terms.options.option_kinds import OneOf
from headrace.terms.options.options import Options
from headrace.update.combinations import refuse_combination, refuse_in_local_steps, refuse_in_stages
from headrace.update.rules.table import RULES
from headrace.update.wires import WIRES

# These are where a run runs, and not among its options.
AT_NODE, LOCAL_STEPS, STAGES = "at a node", "local steps", "stages"


def choices() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the choices of each axis, in words, with the options that express them."""
    rules = {text: {"optimizer": text} for text in _rules()}
    return {
        "gradient": {kind.name: {"gradient": kind.name} for kind in WIRES if kind.named_by == "gradient"},
        "adapter": {"none": {}, **{name: {"adapter": name} for name in ADAPTERS}},
        "place": {"one machine": {}, **{place: {place: True} for place in (AT_NODE, LOCAL_STEPS, STAGES)}},
        "train": {ALL: {}, MATRICES: {"train": MATRICES}},
        "rule": rules,
        "compute": {dtype: {"compute_dtype": dtype} for dtype in COMPUTE_DTYPES},
        "clipping": {"to a norm": {"max_grad_norm": 1.0}, "none": {"max_grad_norm": 0}},
        "checkpoints": {"each step": {}, "seldom": {"checkpoint_every": 3}},
        "kernels": {"the model's": {}, **{name: {name: True} for name in ("compile_blocks", "liger")}},
    }


def refusal(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return why two choices are refused together, "" if they are not."""
    given = {**one, **other}
    at_node = given.pop(AT_NODE, False)
    in_local_steps = given.pop(LOCAL_STEPS, False)
    in_stages = given.pop(STAGES, False)
    try:
        refuse_combination(Options(**given), at_node=at_node)
        if in_local_steps:
            refuse_in_local_steps(Options(**given))
        if in_stages:
            refuse_in_stages(Options(**given))
    except ConfigError as error:
        return str(error)
    return ""


def refused() -> Iterator[tuple[str, str, str]]:
    """Yield every two choices of different axes that are refused together, and why."""
    axes = list(choices().values())
    for index, axis in enumerate(axes):
        for later in axes[index + 1 :]:
            for one, options in axis.items():
                for other, more in later.items():
                    if why := refusal(options, more):
                        yield one, other, why


def combinations() -> str:
    """Return the part of docs/features.md about all choices, and those that are refused together."""
    lines = [
        "",
        "## What combines",
        "",
        "Every choice goes with every choice of another row, and with all placements, packing, accumulation and resuming.",
        "The exceptions are below. They are refused before anything is read or written, and the refusal says why.",
        "",
        "| axis | choices |",
        "|---|---|",
        *(f"| {axis} | {', '.join(f'`{value}`' for value in values)} |" for axis, values in choices().items()),
        "",
        "| this | not with | instead |",
        "|---|---|---|",
        *(f"| {_code(ones)} | {_code(others)} | {advice} |" for ones, others, advice in _alike()),
        "",
    ]
    return "\n".join(lines)


def _alike() -> Iterator[tuple[tuple[str, ...], tuple[str, ...], str]]:
    """Yield the refused pairs by what is advised: these choices go with none of those."""
    others_of: dict[tuple[str, str], list[str]] = {}
    for one, other, why in refused():
        others_of.setdefault((one, re.split(r"[;:] ", why)[-1]), []).append(other)
    ones_of: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for (one, advice), others in others_of.items():
        ones_of.setdefault((tuple(others), advice), []).append(one)
    yield from ((tuple(ones), others, advice) for (others, advice), ones in ones_of.items())


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _rules() -> Iterator[str]:
    """Yield each rule as `--optimizer` names it, and with each value of the settings that are one of a few."""
    for kind in RULES:
        yield kind.name
        for each in kind.settings():
            yield from (f"{kind.name}:{each.key}={value}" for value in _others(each))


def _others(setting: Declaration) -> tuple[str, ...]:
    return tuple(name for name in setting.kind.names if name != setting.default) if isinstance(setting.kind, OneOf) else ()


if __name__ == "__main__":
    renew("features.md", "tests/choices.py", combinations())
