"""Which of a run's choices can be combined: the pairs that are refused, found without a model.

Invariant: choices that are not refused here work together; `tests/equivalence/test_combinations.py` walks all of them.
"""

from headrace.losses import loss_of
from headrace.terms.errors import ConfigError
from headrace.terms.options.adapter import adapter_of
from headrace.terms.options.options import Options
from headrace.terms.options.row_table import DENSE, Table
from headrace.terms.options.summing import TREE
from headrace.update.rules.table import optimizer_of, rule_of
from headrace.update.wires import wire_of
from headrace.update.wires.rows import Rows

# Options that a node does not take, and why.
_NOT_AT_A_NODE = {
    "gradient": "workers send whole gradients",
    "train": "it updates all of each unit",
    "adapter": "workers hold nothing that is trained",
    "loss": "a loss of the whole step needs all rows in one place",
}


def refuse_combination(options: Options, *, at_node: bool = False) -> None:
    """Refuse choices that exclude one another. It is quick: no model is read.

    Raises:
        ConfigError: two choices exclude one another, or one does not exist; the message names what to choose instead.
    """
    wire, optimizer = wire_of(options), optimizer_of(options)
    wire.refuse(optimizer)
    rule_of(optimizer, options.compute_dtype)
    loss_of(options.loss)
    for name, why in _NOT_AT_A_NODE.items() if at_node else ():
        declared = next(each for each in Options.declarations() if each.key == name)
        if (value := getattr(options, name)) != declared.default:
            raise ConfigError(f"{name}: {value} is not possible at a node: {why}; leave it out, or train on one machine")


def refuse_in_ranks(options: Options) -> None:
    """Refuse what ranks cannot share out yet.

    Raises:
        ConfigError: it is asked for.
    """
    _refuse_shared(options, "ranks")


def refuse_in_stages(options: Options) -> None:
    """Refuse what stages cannot do yet.

    Raises:
        ConfigError: it is asked for.
    """
    _refuse_shared(options, "stages")
    if options.interpreter == "plain":
        raise ConfigError("interpreter: plain would wait for another stage within a commit; leave it out")
    if options.gradient_sum == TREE:
        raise ConfigError("gradient_sum: stages add micro-batches in their order; leave tree out")


def refuse_in_local_steps(options: Options) -> None:
    """Refuse what learners that train by themselves cannot merge.

    Raises:
        ConfigError: it is asked for.
    """
    _refuse_rows(options, "learners do not merge rows")


def _refuse_shared(options: Options, who: str) -> None:
    if options.gradient.partition(":")[0] == "lsp":
        raise ConfigError(f"gradient: lsp changes its subspaces by whole matrices, which {who} do not have; leave it out")
    _refuse_rows(options, f"{who} do not share out rows")
    if options.loss:
        raise ConfigError(f"loss: {options.loss} needs all rows in one place, and {who} share out a step; train on one machine")


def _refuse_rows(options: Options, why: str) -> None:
    """Refuse tables whose rows are updated one by one: the embedding, or adapters."""
    if options.gradient.partition(":")[0] == Rows.name:
        raise ConfigError(f"gradient: rows: {why}; give dense, or train on one machine")
    if options.adapter and isinstance(table := adapter_of(options.adapter), Table) and table.policy != DENSE:
        raise ConfigError(f"adapter: table: {why}; give policy=dense, or train on one machine")
