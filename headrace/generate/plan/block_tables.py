"""Tables of a generation, in blocks and the embedding, whose rows stay in the file; and what passes wait for them.

Invariant: a plan without files answers as the run does, and hidden states have the same bits either way.
"""

from dataclasses import replace

from headrace.ask.place import RunPlace
from headrace.model import Chain, WeightMap
from headrace.model.by_rows.block_tables import block_tables_of, is_large, take_tables
from headrace.model.by_rows.embedding_rows import embedding_bytes, has_rows, read_embedding_rows
from headrace.plan.clock.rates import Rates
from headrace.terms.costs import GenerationCosts, PassCosts
from headrace.terms.embedding_rows import note_on_rows
from headrace.terms.options.budget import Budget


def without_tables(chain: Chain, weights: WeightMap | None, place: RunPlace, budget: Budget) -> None:
    """Leave large tables in blocks of `chain` in their files; all of them if the weights are more than the memory of `place`.

    `weights` says where rows lie; None for a plan.
    """
    found = block_tables_of(chain, weights)
    take_tables(chain, [each for each in found if is_large(each)])
    if is_short(chain, place, budget):
        take_tables(chain, [each for each in found if not is_large(each)])


def costs_with_waits(costs: GenerationCosts, rates: Rates) -> GenerationCosts:
    """Return costs whose passes wait for rows of tables."""
    return replace(costs, first=_waiting(costs.first, rates), next=_waiting(costs.next, rates))


def held_bytes(costs: GenerationCosts) -> int:
    """Return the host memory that reading a table's rows takes in a pass; one seat runs at a time."""
    return max((each.held_bytes(1) for each in (*costs.first.tables, *costs.next.tables)), default=0)


def notes_on_tables(costs: GenerationCosts) -> tuple[str, ...]:
    """Return for a person which tables are not in memory, and what a seat's pass over prompts reads of them."""
    return tuple(each.note(1, costs.rows * costs.first_tokens) for each in costs.first.tables)


def _waiting(costs: PassCosts, rates: Rates) -> PassCosts:
    """Return a pass that computes, and reads memory, for as much longer as it waits: whichever of both limits a block."""
    flops, touched = list(costs.flops), [0] * len(costs.flops)
    for each in costs.tables:
        seconds = each.seconds(1, rates.ceilings.ssd_read_bytes_per_second)
        flops[each.unit - 1] += seconds * rates.flops_per_second
        touched[each.unit - 1] += round(seconds * rates.memory_bytes_per_second)
    return replace(costs, flops=tuple(flops), waited_bytes=tuple(touched)) if costs.tables else costs


def without_embedding(chain: Chain, weights: WeightMap | None, place: RunPlace, budget: Budget) -> tuple[str, ...]:
    """Leave the embedding of `chain` in its file if the weights are more than the memory of `place`; return what to say of it.

    `weights` says where rows lie; None for a plan.
    """
    if not is_short(chain, place, budget) or not has_rows(chain, weights):
        return ()
    num_bytes = embedding_bytes(chain)
    read_embedding_rows(chain, weights)
    return (note_on_rows(num_bytes),)


def is_short(chain: Chain, place: RunPlace, budget: Budget) -> bool:
    """Return whether the weights of a chain are more than the memory for them."""
    host = place.host_bytes if budget.host_bytes is None else budget.host_bytes
    device = (place.device_bytes if budget.device_bytes is None else budget.device_bytes) or 0
    needed = sum(layout.num_elements for layout in chain.layouts) * chain.dtype.itemsize
    return needed > host - place.runtime_bytes + device
