"""Whether a generation reads rows of the embedding from the file: where the weights do not fit in memory.

Invariant: a plan without files answers as the run does, and hidden states have the same bits either way.
"""

from headrace.ask.place import RunPlace
from headrace.model import Chain, WeightMap
from headrace.model.by_rows.embedding_rows import embedding_bytes, has_rows, read_embedding_rows
from headrace.terms.embedding_rows import note_on_rows
from headrace.terms.options.budget import Budget


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
