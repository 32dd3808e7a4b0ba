"""Where a generation's keys and values live, block by block: where blocks are computed, in host memory, or on the drives.

Keys and values of a block that live elsewhere are prefetched for each seat before it enters the block. Only those of new tokens
go back. Full pages lie on the drives; a page that is not full yet waits in host memory.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from headrace.generate.plan.prefix_plan import PrefixPlan
from headrace.plan.value.weight_sizes import BufferGroup
from headrace.terms.costs import CARRIED_ALIGNMENT, GenerationCosts
from headrace.terms.sizes import MIB, PAGE_BYTES, round_up

COMPUTE, HOST, SSD = "compute", "host", "ssd"
# How many of one seat's caches of one block are on their way at once: one is used, the others come and go.
SLOT_CHOICES = (4, 2)
_MASK_BYTES = 4  # of a number of a mask
# Decoding a number takes as long as reading so many times its bytes.
_DECODING_TIMES = 4
_PARTS, _SINK_BYTES = 5, 4096  # queries, keys, values, a mask, and a number for each head
# The number of ways to divide blocks among homes that are tried: between two homes, and among three.
_MOST_STEPS, _MOST_STEPS_OF_TWO = 8, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """`homes` are by block; (): all are where compute is. `slots` of one seat's cache of one block are on their way at once.

    `attends`: where caches live elsewhere the host attends for new tokens, so that these caches do not come to the device.
    `inputs` are the blocks (from 1) whose prompts are kept as inputs, of which keys and values are computed again (KVPR).
    `prefixes` says what is kept of prompts for others that begin alike, None where nothing is.
    """

    homes: tuple[str, ...] = ()
    slots: int = 0
    page_bytes: int = MIB
    attends: bool = False
    inputs: tuple[int, ...] = ()
    prefixes: PrefixPlan | None = None

    def home(self, block: int) -> str:
        """Return the home of block `block` (from 1)."""
        return self.homes[block - 1] if self.homes else COMPUTE

    def blocks(self, home: str) -> tuple[int, ...]:
        """Return the blocks (from 1) with that home; none where all are where compute is."""
        return tuple(number for number, each in enumerate(self.homes, start=1) if each == home)

    @property
    def moves(self) -> bool:
        """Whether any cache lives elsewhere than where compute is."""
        return any(home != COMPUTE for home in self.homes)


def whole_bytes(costs: GenerationCosts, new_tokens: int, block: int) -> int:
    """Return the bytes of a seat's cache of block `block` (from 1) at the end."""
    return costs.cache_bytes[block - 1] + new_tokens * costs.cache_token_bytes[block - 1]


def working_bytes(costs: GenerationCosts, new_tokens: int, block: int) -> int:
    """Return the bytes of the copies that attention gets of such a cache: they have no codes."""
    whole = whole_bytes(costs, new_tokens, block)
    if costs.coded is None or not costs.is_coded(block):
        return whole
    return whole // costs.cache_token_bytes[block - 1] * costs.coded.decoded_bytes[block - 1]


def touched_bytes(costs: GenerationCosts, held_bytes: int, block: int) -> int:
    """Return the bytes of memory whose reading takes as long as giving attention a cache of `held_bytes`.

    Attention copies keys and values, and reads the copy: they cross compute's memory three times. Codes are decoded, too.
    """
    if costs.coded is None or not costs.is_coded(block):
        return 3 * held_bytes
    decoded = held_bytes * costs.coded.decoded_bytes[block - 1] // costs.cache_token_bytes[block - 1]
    return held_bytes + (3 + _DECODING_TIMES) * decoded


def resident_blocks(caches: CachePlan, costs: GenerationCosts) -> tuple[int, ...]:
    """Return the blocks (from 1) whose caches stay where compute is, in buffers of the plan: those that are coded."""
    blocks = range(1, len(costs.cache_bytes) + 1)
    return tuple(block for block in blocks if caches.home(block) == COMPUTE and costs.is_coded(block))


def prompt_bytes(caches: CachePlan, costs: GenerationCosts, block: int) -> int:
    """Return the bytes that are stored of a prompt in block `block` (from 1): its inputs, or keys and values."""
    by_inputs = costs.recomputing is not None and block in caches.inputs
    return costs.recomputing.input_bytes if costs.recomputing is not None and by_inputs else costs.cache_bytes[block - 1]


def moved_bytes(caches: CachePlan, costs: GenerationCosts, new_tokens: int, block: int) -> int:
    """Return the bytes that come to a block for a seat, once it has so many new tokens."""
    return prompt_bytes(caches, costs, block) + new_tokens * costs.cache_token_bytes[block - 1]


def with_inputs(caches: CachePlan, costs: GenerationCosts) -> Iterator[CachePlan]:
    """Yield the plans that keep prompts of some blocks as inputs; there are few, spread evenly over the numbers of blocks.

    Splitting blocks is as good as splitting tokens: what is read for one seat in one block comes while others are computed.
    """
    found = costs.recomputing
    if found is None or caches.attends:
        return
    moving = [*caches.blocks(HOST), *caches.blocks(SSD)]
    smaller = sorted(block for block in moving if found.input_bytes < costs.cache_bytes[block - 1])
    steps = min(len(smaller), _MOST_STEPS)
    for count in sorted({round(step * len(smaller) / steps) for step in range(1, steps + 1)} if steps else ()):
        yield replace(caches, inputs=tuple(_spread(smaller, count)))


def cache_drive_bytes(caches: CachePlan, costs: GenerationCosts, new_tokens: int, block: int) -> int:
    """Return how many of these bytes can lie on the drives: full pages."""
    return whole_bytes(costs, new_tokens, block) // caches.page_bytes * caches.page_bytes


def tail_bytes(caches: CachePlan, costs: GenerationCosts, new_tokens: int, block: int) -> int:
    """Return how many of these bytes at most wait in host memory for a page to be full."""
    return min(caches.page_bytes, round_up(whole_bytes(costs, new_tokens, block), PAGE_BYTES))


def query_out_bytes(costs: GenerationCosts, block: int, tokens: int) -> int:
    """Return what goes down for the host to attend: queries, new keys and values, and a mask over `tokens` tokens."""
    mask = costs.rows * tokens * _MASK_BYTES
    return costs.next.query_bytes[block - 1] + costs.cache_token_bytes[block - 1] + mask


def carried_bytes(costs: GenerationCosts, new_tokens: int, block: int) -> int:
    """Return the bytes of a seat's buffer for what goes down and comes back."""
    down = query_out_bytes(costs, block, costs.prompt_length + new_tokens) + _PARTS * CARRIED_ALIGNMENT + _SINK_BYTES
    return max(down, costs.next.result_bytes[block - 1])


def cache_buffers(
    caches: CachePlan, costs: GenerationCosts, new_tokens: int, seats: int, *, separate_device: bool
) -> dict[str, BufferGroup]:
    """Return by name the groups of buffers for caches elsewhere or on their way."""
    moving, stays = [*caches.blocks(HOST), *caches.blocks(SSD)], resident_blocks(caches, costs)
    resident = sum(round_up(whole_bytes(costs, new_tokens, block), PAGE_BYTES) for block in stays)
    coded = BufferGroup("device" if separate_device else "host", "cache", seats, resident)
    if not moving:
        return {"cache_resident": coded} if resident else {}
    # What is stored begins on a page, behind room for keys and values that are made of inputs.
    slot = max(round_up(whole_bytes(costs, new_tokens, block), PAGE_BYTES) for block in moving) + PAGE_BYTES * bool(
        caches.inputs
    )
    tails = sum(tail_bytes(caches, costs, new_tokens, block) for block in caches.blocks(SSD))
    kept = sum(round_up(whole_bytes(costs, new_tokens, block), PAGE_BYTES) for block in caches.blocks(HOST))
    groups = {
        "cache_resident": coded,
        "cache_on_its_way": BufferGroup("host", "cache", caches.slots if tails else 0, slot),
        "cache_tails": BufferGroup("host", "cache", seats, tails),
        "cache_kept": BufferGroup("host", "cache", seats, kept),
        "cache_on_device": BufferGroup("device", "cache", caches.slots if separate_device else 0, slot),
    }
    if caches.attends and separate_device:
        carried = round_up(max(carried_bytes(costs, new_tokens, block) for block in moving), PAGE_BYTES)
        groups |= {
            "cache_carried": BufferGroup("device", "cache", seats, carried),
            "cache_carried_host": BufferGroup("host", "cache", seats, carried),
        }
    return {name: group for name, group in groups.items() if group.total_bytes}


def cache_choices(
    tiered: tuple[bool, ...],
    *,
    separate_device: bool,
    has_drives: bool,
    num_blocks: int,
    attention: Sequence[bool] = (False,),
) -> Iterator[CachePlan]:
    """Yield the placements of caches to try; those that keep most of them where compute is come first.

    `attention`: which of attending on the host (true) and not are tried. If the host attends, all caches that can live
    elsewhere do. So the same blocks attend there, with the same bits, whatever else is planned.
    """
    if False in attention:
        yield CachePlan()
    movable = [block for block, may in enumerate(tiered) if may]
    if not movable or not (separate_device or has_drives):
        return
    both = separate_device and has_drives
    steps = min(len(movable), _MOST_STEPS_OF_TWO if both else _MOST_STEPS)
    counts = sorted({round(step * len(movable) / steps) for step in range(steps + 1)})
    for away in counts[1:]:
        for on_drives in counts if both else [away if has_drives else 0]:
            if on_drives > away:
                continue
            homes = [COMPUTE] * num_blocks
            # Spread evenly, so that reads come evenly, too.
            spread = _spread(movable, away)
            for block in spread:
                homes[block] = HOST
            for block in _spread(spread, on_drives):
                homes[block] = SSD
            for slots, attends in itertools.product(SLOT_CHOICES, attention):
                if not attends or away == len(movable):
                    yield CachePlan(homes=tuple(homes), slots=slots, attends=attends)


def _spread(blocks: list[int], count: int) -> list[int]:
    return [blocks[(2 * number + 1) * len(blocks) // (2 * count)] for number in range(count)]
