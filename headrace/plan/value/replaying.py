"""Which operator outputs may be kept for backward and replayed there, and in which order it pays."""

from headrace.terms.costs import ATTENTION, ModelCosts, OperatorCosts


def replay_order(costs: ModelCosts, attention_share: float = 1.0) -> list[tuple[int, int]]:
    """Return all (block, ordinal) whose output may be kept, best benefit per byte first (Fuyou: OB = FLOP / A).

    An operation of attention counts as so many of a matrix product as take its time: `1 / attention_share`. With equal benefit,
    deep blocks come first, because theirs wait shortest. Outputs that recompute skips anyway are left out, and so are those of
    operators that must run again.
    """
    pairs = [
        (block, ordinal)
        for block, costs_of_block in enumerate(costs.blocks)
        for ordinal, operator in enumerate(costs_of_block.operators)
        if ordinal not in costs_of_block.skippable and not operator.must_run
    ]

    def benefit(operator: OperatorCosts) -> float:
        weight = 1 / attention_share if operator.name == ATTENTION else 1.0
        return weight * operator.flops / max(1, operator.output_bytes)

    # Computed once for equal blocks: they share their costs.
    benefits = {id(block): [benefit(operator) for operator in block.operators] for block in costs.blocks}
    return sorted(pairs, key=lambda pair: (-benefits[id(costs.blocks[pair[0]])][pair[1]], -pair[0], pair[1]))


def operators_of(costs: ModelCosts) -> tuple[tuple[str, ...], ...]:
    """Return the names of each block's operators, in the order in which plans count them."""
    return tuple(tuple(operator.name for operator in block.operators) for block in costs.blocks)
