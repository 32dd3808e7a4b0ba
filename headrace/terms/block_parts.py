"""Blocks whose weights come in parts: what a plan knows of them.

A part is the weights of one linear module. Compute brings it from host memory to the device when forward reaches it, and again
when backward needs it. Where it is trained, its gradient leaves for host memory as soon as it is made. So the device never
holds all of a block: a few parts, and what has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.terms.layout import Runs
from headrace.terms.sizes import format_bytes

# Parts on the device: the one that computes, and the one that comes next. As many gradients are on their way to the host.
PART_SLOTS = 2
# How often each part comes for a micro-batch: for forward, for recompute, for backward.
_FORWARD, _BACKWARD = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockParts:
    """How the weights of blocks come in parts.

    Attributes:
        rest: by unit, which of its elements come as a whole, before it computes; () where it has no parts.
        elements: elements of the largest part.
        moved: by unit, the elements of all its parts.
        times: in a coarse plan, how many micro-batches one stands for.
    """

    rest: tuple[Runs, ...]
    elements: int
    moved: tuple[int, ...]
    times: float = 1.0

    def forward_bytes(self, unit: int, bytes_per_element: int) -> int:
        """Return the bytes that forward brings of a unit for a micro-batch."""
        return round(_FORWARD * self.times * self.moved[unit] * bytes_per_element)

    def backward_bytes(self, unit: int, bytes_per_element: int) -> int:
        """Return the bytes that recompute and backward bring of a unit for a micro-batch."""
        return round(_BACKWARD * self.times * self.moved[unit] * bytes_per_element)

    def gradient_bytes(self, unit: int, bytes_per_element: int) -> int:
        """Return the bytes of gradients of parts of a unit, for a micro-batch."""
        return round(self.times * self.moved[unit] * bytes_per_element)

    def describe(self, bytes_per_element: int, num_micro_batches: int, *, leaving: bool = False) -> str:
        """Return words about how parts come in a step, and whether their gradients are `leaving` one by one."""
        moved = (_FORWARD + _BACKWARD + leaving) * num_micro_batches * sum(self.moved) * bytes_per_element
        largest = format_bytes(self.elements * bytes_per_element)
        gradients = ", and its gradient leaves by itself" if leaving else ""
        return (
            f"each linear module of a block comes by itself, at most {largest}, {PART_SLOTS} on the device{gradients}; "
            f"{format_bytes(moved)} cross the link in a step"
        )

    def merged(self, groups: Sequence[Sequence[int]]) -> "BlockParts":
        """Return the parts of a plan in which each of these `groups` of blocks, counted from 0, is one."""
        sizes = [sum(stop - start for start, stop in runs) for runs in self.rest]
        joined = [sum(sizes[block + 1] for block in group) for group in groups]
        behind = 1 + sum(map(len, groups))
        rest = (self.rest[0], *(((0, size),) if size else () for size in joined), *self.rest[behind:])
        moved = (self.moved[0], *(sum(self.moved[block + 1] for block in group) for group in groups), *self.moved[behind:])
        return replace(self, rest=rest, moved=moved)


def no_parts() -> BlockParts | None:
    """Return how blocks come in parts where they cannot."""
    return None


def note_on_block_parts(tier: str, needed_bytes: int) -> str:
    """Return a note for a person: blocks come in parts, because whole ones had no room."""
    return f"blocks come in parts: whole blocks need {format_bytes(needed_bytes)} of {tier} memory"


def note_on_one_block(tier: str, needed_bytes: int) -> str:
    """Return a note for a person: a block is read only when the one before is done with, because two had no room."""
    return f"one block at a time is in memory: two need {format_bytes(needed_bytes)} of {tier} memory"
