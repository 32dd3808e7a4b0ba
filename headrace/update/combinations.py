"""Which of a run's choices can be combined: the pairs that are refused, found without a model, and docs/combinations.md.

Values come from where they are declared (rules, ways for gradients, adapters), so that a new one is in the table. Invariant:
choices that are not refused here work together; `tests/equivalence/test_combinations.py` walks the table.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from headrace.terms.adapter import ADAPTERS
from headrace.terms.declared import Declaration
from headrace.terms.errors import ConfigError
from headrace.terms.layout import COMPUTE_DTYPES, rest_of_master
from headrace.terms.optimizer import ALL, MATRICES
from headrace.terms.option_kinds import OneOf
from headrace.terms.options import Options
from headrace.update.rules.table import RULES, optimizer_of, rule_of
from headrace.update.wire import SubspaceWire
from headrace.update.wires import WIRES, wire_of

# Options that a node does not take, and why.
_NOT_AT_A_NODE = {
    "gradient": "workers send whole gradients",
    "train": "it updates all of each unit",
    "adapter": "workers hold nothing that is trained",
}
# This is where a run runs, and not one of its options.
_AT_NODE = "at a node"


def refuse_combination(options: Options, *, at_node: bool = False) -> None:
    """Refuse choices that exclude one another. It is quick: no model is read.

    Raises:
        ConfigError: two choices exclude one another, or one does not exist; the message names what to choose instead.
    """
    wire, optimizer = wire_of(options), optimizer_of(options)
    if isinstance(wire, SubspaceWire):
        wire.refuse(rule_of(optimizer, "float32").planes.states)
        if rest_of_master(rule_of(optimizer, "bfloat16").planes.states) is None:
            raise ConfigError(
                "gradient: lsp merges the trained subspace into a master, and this rule keeps none: use lomo, or leave lsp out"
            )
    rule_of(optimizer, options.compute_dtype)
    for name, why in _NOT_AT_A_NODE.items() if at_node else ():
        declared = next(each for each in Options.declarations() if each.key == name)
        if (value := getattr(options, name)) != declared.default:
            raise ConfigError(f"{name}: {value} is not possible at a node: {why}; leave it out, or train on one machine")


def choices() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the choices of each axis, in words, with the options that express them."""
    rules = {text: {"optimizer": text} for text in _rules()}
    return {
        "gradient": {kind.name: {"gradient": kind.name} for kind in WIRES},
        "adapter": {"none": {}, **{name: {"adapter": name} for name in ADAPTERS}},
        "place": {"one machine": {}, _AT_NODE: {_AT_NODE: True}},
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
    at_node = given.pop(_AT_NODE, False)
    try:
        refuse_combination(Options(**given), at_node=at_node)
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


def combinations_page() -> str:
    """Return docs/combinations.md: all choices, and those that are refused together."""
    lines = [
        "# What combines with what",
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
        "This page is generated (`headrace/update/combinations.py`); `tests/equivalence/test_combinations.py` walks it.",
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
