"""The plan of a generation: what lives where, how many rows go through the model together, and what a pass takes.

Invariant: memory is the sum of the buffers below and of what compute makes, and stays within the budgets.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from headrace.codec.table import code_of_kind
from headrace.generate.plan.cache_plan import COMPUTE, HOST, SSD, CachePlan, cache_buffers
from headrace.generate.plan.pass_forecast import PassForecast, explain_times
from headrace.generate.plan.prefix_plan import PrefixPlan
from headrace.generate.plan.seat_shapes import SeatShapes
from headrace.plan.value.expert_plan import ExpertPlan, expert_buffers
from headrace.plan.value.placement import Placement, WeightSizes, weight_sizes_of
from headrace.plan.value.weight_sizes import BufferGroup, weight_groups
from headrace.terms.costs import FEW_ROWS, GenerationCosts
from headrace.terms.sizes import format_bytes
from headrace.terms.tables import memory_line, ten_lines

# A core without bfloat16 products reads 9 GB/s of weights for few rows, and widens 2.5 GB/s for more; plain reading is 30 GB/s.
_FEW_ROWS_TIMES, _WIDENED_TIMES = 3.3, 12.0
# A core multiplies one row, and up to four, with the loop for narrow products (docs/log/narrow-rows.md).
_NARROW_ROW_TIMES, _NARROW_TIMES = 1.3, 3.0
# A core multiplies with packed weights while it could read three times their bytes (docs/log/packed-generation.md).
_PACKED_TIMES = 3.0
# While a core multiplies a row by a weight in its code, or decodes it before a product, it could read so many bytes. Each
# further row takes a part of that (docs/log/decoding-rates.md).
_PACKED_BYTES, _MORE_ROWS, _DECODED_BYTES = 12.0, 0.25, 25.0
# Up to so many rows are multiplied with weights in their codes.
PACKED_ROWS = 8
# With fewer passes bits stay those of decoded weights.
LEAST_PACKED_PASSES = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class FewRows:
    """Whether few rows are multiplied with packed weights, and by the loop for narrow products; None: as the options say."""

    packed: bool | None = None
    narrow: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan(Placement):
    """Every choice of a generation. Units as in `Plan`; prologue and epilogue stay where compute reads them.

    A *seat* is a micro-batch of `rows` rows; `seats` of them go through the blocks together. `host_slots` blocks are in host
    memory; what comes does so `prefetch` blocks ahead, on a separate device in pages (`page_bytes`). If that is one block, one
    block less than there are slots need not be read again in the next pass, because the order of use is known. `costs` are
    those of one seat. With `experts` these come by themselves, and `units` are without them. With `kept_copies` caches stay
    where compute is, with so many copies of each row: for beams, or drafts that may be taken back. Where
    `packed_rows` is not 0, matrices of blocks stay in their codes. Up to so many rows are multiplied with these, more with one
    matrix at a time decoded. Products of up to
    `narrow_rows` rows of bfloat16 are computed by a loop of our own. With `shapes` micro-batches of short prompts have more
    rows than those of long ones: `rows` and `costs` are of a seat on average, `most` has the most of each figure. `uncoded`
    is what coded weights would take in the compute dtype, by a plan of their own, where anybody asked. `unused_tensors` are
    stored tensors that the model has no place for; None if no files were opened for the plan.
    """

    rows: int
    seats: int
    prompts: int
    prompt_length: int
    new_tokens: int
    kept_copies: int = 0
    costs: GenerationCosts
    experts: ExpertPlan | None = None
    packed_rows: int = 0
    narrow_rows: int = 0
    caches: CachePlan = field(default_factory=CachePlan)
    shapes: SeatShapes | None = None
    most: GenerationCosts | None = None
    forecast: PassForecast | None = None
    uncoded: PassForecast | None = None
    unused_tensors: tuple[str, ...] | None = None

    def brief(self) -> str:
        """Return what decides, in ten lines: memory in one, and no word that only its makers use."""
        tiers = tuple(self.results.peak_bytes)
        left = ("products", "attention", *tiers)
        lines = [each for each in self.explain().splitlines() if not each.startswith(left)]
        at = next((index for index, each in enumerate(lines) if each.startswith("speed")), len(lines))
        used = {tier: self.peak(tier) for tier in tiers}
        lines.insert(at, f"memory   {memory_line(used, self.results.allowed_bytes)}")
        return ten_lines(lines)

    @property
    def most_costs(self) -> GenerationCosts:
        """Costs that no seat exceeds: memory is planned for these."""
        return self.most or self.costs

    @property
    def most_tokens(self) -> int:
        """Tokens of all rows of a seat in a pass over prompts, at most."""
        each = self.shapes.each if self.shapes is not None else ((self.rows, self.prompt_length),)
        return max(rows * min(length, self.most_costs.first_tokens) for rows, length in each)

    @property
    def prefixes(self) -> PrefixPlan | None:
        """What is kept of prompts, None where nothing is."""
        return self.caches.prefixes

    @property
    def tiered_blocks(self) -> tuple[int, ...]:
        """The blocks (from 0) whose caches lie in buffers of the plan, coded or elsewhere, if they grow with each token."""
        blocks = range(1, self.num_blocks + 1)
        coded = tuple(block - 1 for block in blocks if self.costs.is_coded(block))
        return coded or tuple(block - 1 for block in blocks if self.caches.home(block) != COMPUTE)

    @property
    def micro_batches(self) -> int:
        """Micro-batches until all prompts are answered."""
        count = -(-self.prompts // self.rows)
        return count if self.shapes is None else min(count, len(self.shapes.each))

    def room(self, length: int) -> int:
        """Return how many rows a micro-batch may have whose longest prompt has `length` tokens."""
        return self.shapes.room(length) if self.shapes is not None else self.rows

    def multiplied_bytes(self, num_bytes: int, rows: int) -> int:
        """Return the bytes of memory whose reading takes as long as multiplying weights of `num_bytes` by `rows` rows."""
        if rows <= self.narrow_rows:
            times = _NARROW_ROW_TIMES if rows == 1 else _NARROW_TIMES
            return round(num_bytes * max(1.0, times / self.compute_threads))
        if not self.costs.widens:
            return num_bytes
        times = _FEW_ROWS_TIMES if rows <= FEW_ROWS else _WIDENED_TIMES
        return round(num_bytes * max(1.0, times / self.compute_threads))

    def block_bytes(self, block: int, rows: int) -> int:
        """Return the bytes of memory whose reading takes as long as multiplying a block's weights by `rows` rows."""
        figures = self.units[block]
        if self.packs and rows <= self.packed_rows and figures.packing_bytes:
            return round(figures.packing_bytes * max(1.0, _PACKED_TIMES / self.compute_threads))
        rest = self.multiplied_bytes(self.slot_bytes(block) - figures.packed_bytes, rows)
        return rest + self.packed_like(figures.packed_weights, figures.packed_bytes, rows)

    @property
    def packs(self) -> bool:
        """Whether matrices that torch's kernel takes are packed for it: all blocks stay in host memory in their codes."""
        return self.packed_rows > 0 and self.experts is None and self.host_slots >= self.num_blocks

    def packed_like(self, weights: int, num_bytes: int, rows: int) -> int:
        """Return likewise the bytes for `weights` that stay in their codes, of `num_bytes`."""
        if not weights:
            return 0
        if rows > self.packed_rows:
            dense = self.multiplied_bytes(self.planes.weight.num_bytes(weights), rows)
            return dense + round(weights * _DECODED_BYTES / self.compute_threads)
        more = 1 + _MORE_ROWS * (rows - 1)
        return round(max(num_bytes, weights * _PACKED_BYTES * more / self.compute_threads))

    def bytes_of_blocks(self, rows: int) -> int:
        """Return the sum of `block_bytes` of all blocks; where none is in a code, alike ones are counted together."""
        if self.packed_rows:
            return sum(self.block_bytes(block, rows) for block in range(1, self.num_blocks + 1))
        return sum(count * self.multiplied_bytes(num_bytes, rows) for num_bytes, count in self.weight_sizes.slots)

    @property
    def head_bytes(self) -> int:
        """Bytes of the head's weights, which may be those of the embedding."""
        return self.planes.weight.num_bytes(round(self.costs.head_flops / 2 / self.costs.rows))

    @property
    def units_with_family(self) -> tuple[int, ...]:
        """The units whose frozen weights are completed; families that compute reads beside them lie there."""
        return tuple(unit for unit, figures in enumerate(self.units) if figures.is_completed)

    @property
    def adapter_bytes(self) -> int:
        """Bytes of trained families that compute reads beside weights: all of them stay where compute is."""
        return sum(4 * unit.update_elements for unit in self.units if unit.is_beside)

    def page_bytes(self, unit: int) -> int:
        """See `Placement.page_bytes`: there are as many pages as seats, unless small."""
        return self.page_of(unit, self.seats)

    @property
    def weight_sizes(self) -> WeightSizes:
        """See `Placement.weight_sizes`: found once for all plans of a search that have the same units."""
        return _sizes_of(_SameUnits(self))

    def holds(self, prompts: int, prompt_length: int, new_tokens: int, kept_copies: int = 0) -> bool:
        """Return whether its buffers suffice for another batch, whose rows have no more tokens."""
        return (
            prompt_length <= self.prompt_length
            and prompt_length + new_tokens <= self.prompt_length + self.new_tokens
            and prompts <= self.prompts
            and kept_copies <= max(self.kept_copies, 0 if self.caches.moves or self.costs.coded else 1)
        )

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        values = Placement.to_json(self)
        if self.costs.recomputing is None:
            del values["costs"]["recomputing"]
        if self.costs.coded is None:
            del values["costs"]["coded"]
        if self.costs.chunks == 1:
            del values["costs"]["chunks"]
        if self.prefixes is None:
            del values["caches"]["prefixes"]
        for each in (values["costs"]["first"], values["costs"]["next"]):
            for name in ("tables", "waited_bytes"):
                if not each[name]:
                    del each[name]
        if not self.caches.inputs:
            del values["caches"]["inputs"]
        if not self.narrow_rows:
            del values["narrow_rows"]
        if self.shapes is None:
            del values["shapes"], values["most"]
        for each in filter(None, (values["forecast"], values["uncoded"])):
            if not each["instead"]:
                del each["instead"]
        return {name: value for name, value in values.items() if name != "unused_tensors" or value is not None}

    def explain(self) -> str:
        """Return the plan in words, one line for each thing."""
        every = {self.rows} if self.shapes is None else {rows for rows, _ in self.shapes.each}
        rows = f"{self.rows} row{'s' if self.rows > 1 else ''}" if len(every) == 1 else f"{min(every)} to {max(every)} rows"
        seats = f"{self.seats} seat{'s' if self.seats > 1 else ''} of {rows}"
        lines = [
            f"generate {self.prompts} prompt{'s' if self.prompts > 1 else ''} of up to {self.prompt_length} tokens, up to "
            f"{self.new_tokens} new ones each; {seats} together",
            *self._explain_prompts(),
            *([f"prefixes {self.prefixes.words}"] if self.prefixes is not None else []),
            *self.explain_memory(),
        ]
        if self.forecast is not None:
            together = min(self.prompts, self.rows * self.seats)
            times = self.prompts, self.new_tokens, together, self.uncoded, self.compute_dtype
            lines += explain_times(self.forecast, *times)
        lines += [f"note     {note}" for note in self.results.notes]
        return "\n".join(lines)

    def _explain_codes(self) -> str:
        """Return what is read of coded weights, what for, and where it is decoded; nothing where none are coded."""
        blocks, figures = range(1, self.num_blocks + 1), self.experts.figures if self.experts is not None else None
        every = [*(unit.decodes for unit in self.units), figures.decodes if figures is not None else ()]
        kinds = {kind for decodes in every for kind, _ in decodes}
        if not kinds:
            return ""
        read, dense = sum(map(self.stored_bytes, blocks)), sum(map(self.slot_bytes, blocks))
        if figures is not None:
            count = sum(figures.num_experts)
            read += count * figures.stored_bytes
            dense += count * self.planes.weight.num_bytes(figures.elements)
        cores = "all cores" if all(code_of_kind(kind).on_all_cores for kind in kinds) else "a core"
        where = "on the device, after they have crossed the link" if self.separate_device else f"on {cores} of the host"
        sizes = f"{format_bytes(read)} for {format_bytes(dense)} in {self.compute_dtype}"
        return f"{', '.join(sorted(kinds))}: {sizes}, decoded {where}"

    def _explain_pages(self) -> str:
        """Return in what pieces blocks cross the link; nothing where all stay, or come in one piece."""
        page, whole = self.largest(self.page_bytes), self.largest(self.sent_bytes)
        return (
            f"; the others come in pages of {format_bytes(page)}"
            if self.device_slots < self.num_blocks and page < whole
            else ""
        )

    def _explain_prompts(self) -> list[str]:
        costs = self.costs
        if costs.chunks > 1:
            return [f"prompts  in chunks of {costs.prefill_chunk} tokens, which pass each block one after the other"]
        if costs.first_passes == 1:
            return []
        return [f"prompts  in chunks of {costs.first_tokens} tokens, {costs.first_passes} passes before the first new token"]

    def explain_memory(self) -> list[str]:
        """Return the memory by purpose, in words, one line for each tier."""
        cached = min(self.host_slots, self.num_blocks)
        lines = [
            f"weights  {self.compute_dtype}, {self.num_blocks} blocks, {cached} of them in host memory"
            + (
                f", {min(self.device_slots, self.num_blocks)} on the device{self._explain_pages()}"
                if self.separate_device
                else ""
            ),
        ]
        if self.experts is not None:
            lines.append(f"experts  {self.experts.describe(self.seats * self.rows)}")
        if codes := self._explain_codes():
            lines.append(f"codes    {codes}")
        if self.packed_rows:
            lines.append(
                f"products of up to {self.packed_rows} rows with weights in their codes, of more with decoded ones: other bits"
            )
        if self.narrow_rows:
            lines.append(f"products of up to {self.narrow_rows} rows by Headrace's own loop")
        if (coded := self.costs.coded) is not None:
            share = sum(
                self.costs.cache_token_bytes[block - 1] for block in range(1, self.num_blocks + 1) if self.costs.is_coded(block)
            )
            lines.append(
                f"caches   in {coded.name}, lossy: {share / sum(coded.decoded_bytes):.2f} of the bytes of {self.compute_dtype}"
            )
        if self.caches.moves:
            elsewhere = ((HOST, "in host memory"), (SSD, "on the drives"))
            places = [f"{len(self.caches.blocks(home))} {words}" for home, words in elsewhere if self.caches.blocks(home)]
            lines.append(f"caches   of {self.num_blocks} blocks: {', '.join(places)}, the rest where compute is")
        if self.caches.inputs:
            where = f"of {len(self.caches.inputs)} blocks as inputs, of which keys and values are computed again"
            lines.append(f"prompts  {where} in each pass")
        if self.caches.attends:
            lines.append("attention of new tokens on the host, where caches are read in place")
        for tier, rows in self.results.peak_bytes.items():
            allowed = self.results.allowed_bytes.get(tier)
            of = f" of {format_bytes(allowed)}" if allowed else ""
            parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in rows.items() if size)
            lines.append(f"{tier:<8} {format_bytes(self.peak(tier))}{of}: {parts}")
        return lines


class _SameUnits:
    """A plan that is equal to others of the very same units; it keeps these alive."""

    def __init__(self, plan: GenerationPlan) -> None:
        self.plan = plan
        self._key = id(plan.units), plan.compute_dtype, plan.num_blocks

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameUnits) and self._key == other._key


@lru_cache(maxsize=8)
def _sizes_of(same: _SameUnits) -> WeightSizes:
    return weight_sizes_of(same.plan)


def weight_buffers(plan: GenerationPlan) -> dict[str, BufferGroup]:
    """Return by name the groups of buffers for weights, experts among them."""
    groups, sizes = weight_groups(plan), plan.weight_sizes
    if plan.experts is not None:
        groups |= expert_buffers(plan.experts, plan.planes.weight, separate=plan.separate_device)
    # Resident units come through host memory, once: through the blocks' slots, if these are large enough.
    slots = groups["host_weights"]
    if plan.separate_device or sizes.resident_is_made:
        groups["coming"] = BufferGroup("host", "weights", 1, max(0, sizes.coming - slots.count * slots.num_bytes))
    return groups


def generation_buffers(plan: GenerationPlan) -> dict[str, BufferGroup]:
    """Return by name the groups of buffers that take anything; the engine takes these and no others."""
    groups = weight_buffers(plan)
    groups |= cache_buffers(plan.caches, plan.most_costs, plan.new_tokens, plan.seats, separate_device=plan.separate_device)
    return {name: group for name, group in groups.items() if group.total_bytes}
