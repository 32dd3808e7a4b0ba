"""How many positions the loss takes at a time: few where logits take memory, all where that spares sums of gradients."""

from collections.abc import Sequence

from headrace.plan.value.workload import Workload
from headrace.terms.costs import ModelCosts
from headrace.terms.forms import UnitFigures
from headrace.terms.sizes import MIB

# Logits and their gradients of one chunk of positions stay below this; beyond it the head gets no faster.
_LOSS_CHUNK_BYTES = 96 * MIB


def spared_sums(units: Sequence[UnitFigures], costs: ModelCosts) -> int:
    """Return the bytes of sums that a step of one micro-batch does without if the loss takes all positions at once
    (`Plan.ends_in_place`).
    """
    ends = [unit.gradient_elements for unit in (units[0], units[-1])]
    return 0 if costs.by_samples else 4 * (sum(ends) if costs.tied else max(ends))


def loss_chunk_tokens(costs: ModelCosts, workload: Workload, lean: bool, spared: int) -> int:
    """Return the largest tried chunk of positions whose logits take little beside the head's own gradient. With the head by
    ranges, none of them is computed again. A lean plan takes all positions where that takes less than is `spared` by it.
    """
    if workload.grouping is not None:
        return workload.grouping.loss_chunk_tokens
    samples, positions = costs.epilogue_workspace_bytes, costs.sequences * workload.sequence_length
    allowed = samples[0][1] + _LOSS_CHUNK_BYTES // (4 if lean else 1)
    if lean and spared and costs.kept_logit_tokens:
        whole = next((num_bytes for tokens, num_bytes in samples if tokens >= positions), None)
        if whole is not None and whole - allowed < spared:
            return positions
    most = max(samples[0][0], costs.kept_logit_tokens or samples[-1][0])
    fitting = [tokens for tokens, num_bytes in samples if num_bytes <= allowed and tokens <= most]
    return min(fitting[-1], positions)
