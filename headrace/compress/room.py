"""What of host memory a compression gets for what: for the command and for its plan alike.

Two forms of the largest block are in memory, and what lies around the blocks. Where there is room, so is the next block; of the
rest a share is for sums of inputs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.codec.table import Code
from headrace.codec.units import coded_shapes
from headrace.model import Chain
from headrace.model.parts.banks import BlockExperts
from headrace.model.streams.stored_experts import expert_layout, without
from headrace.terms.coding import as_matrix
from headrace.terms.layout import UnitLayout
from headrace.terms.sizes import MIB, format_bytes

# Sums of inputs get this fraction (1 / n) of the memory beside weights; the rest is for rounding and what blocks compute.
_SHARE_OF_SUMS = 3
_LEAST_REST_BYTES = 64 * MIB
# Interpreter, libraries and what they keep (docs/log/process-memory).
_RUNTIME_BYTES = 340 * MIB
# Where memory is less than so many times what is needed at least, freed memory is given back at once.
_ROOMY = 8
# The next block is read ahead where this many blocks fit beside two forms of one: sums of inputs need most of what is left.
_AHEAD = 4


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes in host memory: of what lies around the blocks, of a block in one form and of its codes, and for sums of inputs at
    once.

    `by_experts`: a block's experts come one at a time, and `block_bytes` has one of them. `ahead`: the next block is read while
    one is rounded, which takes its bytes once more.
    """

    allowed_bytes: int
    ends_bytes: int
    block_bytes: int
    sums_bytes: int
    by_experts: bool
    ahead: bool = False
    codes_bytes: int = 0

    @property
    def tight(self) -> bool:
        """Whether pieces that the C library keeps of freed memory would count."""
        return self.allowed_bytes < _ROOMY * self.needed_bytes

    @property
    def needed_bytes(self) -> int:
        """The bytes that it takes at least, however little is allowed."""
        return self.ends_bytes + 2 * self.block_bytes + self.codes_bytes + _LEAST_REST_BYTES

    @property
    def warning(self) -> str:
        """What to say where it takes more than is allowed; else ""."""
        if self.needed_bytes <= self.allowed_bytes:
            return ""
        needed, allowed = format_bytes(self.needed_bytes), format_bytes(self.allowed_bytes)
        return f"host memory: compressing takes {needed} at least, allowed are {allowed}: it will take more than that"


def room_in(
    chain: Chain,
    experts: Sequence[BlockExperts | None],
    host_bytes: int,
    bytes_per_element: int,
    *,
    come_singly: bool,
    by_experts: bool | None = None,
    code: Code | None = None,
) -> Room:
    """Return the room in `host_bytes`. `come_singly`: experts can be read one at a time, which is done where blocks are too
    large; or as `by_experts` says. The codes of a block, in `code`, are there until its file is written.
    """
    blocks = [layout.num_elements for layout in chain.layouts[1 : chain.num_blocks + 1]]  # some models have nothing behind
    ends, largest = sum(layout.num_elements for layout in chain.layouts) - sum(blocks), max(blocks)
    too_large = 2 * largest * bytes_per_element > host_bytes // 2
    apart = (too_large if by_experts is None else by_experts) and come_singly
    if apart:
        largest = max(_elements_by_experts(chain, block, each) for block, each in enumerate(experts))
    codes = max(_codes_bytes(layout, code) for layout in chain.layouts[1 : chain.num_blocks + 1]) if code is not None else 0
    rest = host_bytes - (ends + 2 * largest) * bytes_per_element - codes - _RUNTIME_BYTES
    ahead = rest >= _AHEAD * largest * bytes_per_element
    rest -= largest * bytes_per_element if ahead else 0
    sums = max(_LEAST_REST_BYTES, rest) // _SHARE_OF_SUMS
    return Room(host_bytes, ends * bytes_per_element, largest * bytes_per_element, sums, apart, ahead, codes)


def _codes_bytes(layout: UnitLayout, code: Code) -> int:
    """Return the most bytes that the codes of a block take."""
    shapes = [as_matrix(spec.shape) for spec in coded_shapes(layout.parameters, code)]
    return round(max(sum(code.matrix_bytes(*shape, otherwise=each) for shape in shapes) for each in (False, True)))


def _elements_by_experts(chain: Chain, block: int, experts: BlockExperts | None) -> int:
    """Return the elements of a block in memory while experts come one at a time: its common part, and one expert."""
    layout = chain.layouts[block + 1]
    if experts is None:
        return layout.num_elements
    names = frozenset(experts.names.values())
    return without(layout, names).num_elements + expert_layout(layout, names, 0).num_elements


def groups_of_sums(num_bytes: Iterable[int], allowed_bytes: int) -> list[int]:
    """Return how many sums of inputs, of so many bytes each, are in each group that is in memory at once; rows pass the block
    once for each group. A single sum may be larger than what is allowed.
    """
    groups: list[int] = []
    room = -1
    for each in num_bytes:
        if each > room:
            groups.append(0)
            room = allowed_bytes
        groups[-1] += 1
        room -= each
    return groups
