"""Single experts in a plan: how large they are, how many there are, and how many are expected to be used.

Every token reads the same part of a mixture's block: attention, norms, router, shared experts. That part is the unit that
streams; the block's other experts come a few at a time, in *rounds*. Either they are those that tokens were sent to, once that
is known (*routed*). Or they are all prefetched, when almost every expert is needed (prefill). No block is in memory as a whole.

Where T tokens choose k of E experts each, E (1 - (1 - k/E)^T) experts are wanted if all are equally likely.
"""

from dataclasses import dataclass

from headrace.plan.value.slots import SOURCE_SLOTS
from headrace.plan.value.weight_sizes import BufferGroup
from headrace.terms.coding import Decodes
from headrace.terms.costs import touched
from headrace.terms.forms import UnitFigures
from headrace.terms.layout import Plane, Runs
from headrace.terms.sizes import PAGE_BYTES, format_bytes, round_up

# Rounds whose experts are in memory: one is computed, two arrive.
ROUNDS_IN_MEMORY = 3
# Rounds of trained experts whose gradients are on the device: one is summed, one leaves.
ROUNDS_SUMMED = 2
# The most rounds of a block: where it has more experts than this, several come at a time.
MOST_ROUNDS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFigures:
    """The units of a generation's plan without their experts, as `units`, and figures of the experts.

    Attributes:
        num_experts: of each unit; 0 where it has none.
        elements: elements of the slot from which an expert is computed, for the largest expert.
        stored_bytes: bytes that are read for the largest expert.
        is_made: whether a slot is made of what is read, and not just read; `making_bytes` as in `UnitFigures`.
        num_parameters: parameters of one expert.
        decodes, making_like, packed_bytes, packed_weights: as in `UnitFigures`, of one expert.
    """

    units: tuple[UnitFigures, ...]
    num_experts: tuple[int, ...]
    elements: int
    stored_bytes: int
    is_made: bool
    making_bytes: int
    num_parameters: int
    decodes: Decodes = ()
    making_like: int = 0
    packed_bytes: int = 0
    packed_weights: int = 0

    def moved_bytes(self, slot_bytes: int) -> int:
        """Return the bytes that making an expert's slot, of `slot_bytes`, takes as long as to move."""
        return max(self.stored_bytes + slot_bytes, self.making_like)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """How experts come. `choices` is how many experts a token is sent to, `in_round` how many experts come together.

    `cached` experts stay in host memory, those that the `policy` says (`terms/shelf.py`). By the `device_policy`, `on_device`
    stay where compute reads them: on the device, or as they are made. A pass prefetches all experts if its tokens are expected
    to use more than `ahead_share` of them. Otherwise it waits for the routers.
    """

    figures: ExpertFigures
    choices: int
    in_round: int
    cached: int = 0
    policy: str = "most-wanted"
    on_device: int = 0
    device_policy: str = "last-used"
    ahead_share: float = 0.6

    def has(self, unit: int) -> bool:
        """Return whether a unit has experts."""
        return self.figures.num_experts[unit] > 0

    def touched(self, unit: int, tokens: int) -> float:
        """Return how many experts of a unit `tokens` tokens are expected to want."""
        return touched(self.figures.num_experts[unit], self.choices, tokens)

    def is_ahead(self, tokens: int) -> bool:
        """Return whether a pass over so many tokens reads all experts ahead."""
        counts = self.figures.num_experts
        whole = sum(counts)
        return sum(self.touched(unit, tokens) for unit in range(len(counts))) > self.ahead_share * whole

    def rounds(self, unit: int, experts: float) -> int:
        """Return in how many rounds so many of a unit's experts come."""
        count = min(self.figures.num_experts[unit], int(-(-experts // 1)))
        return -(-count // self.in_round)

    def most_rounds(self, unit: int, tokens: int) -> int:
        """Return the most rounds that so many tokens can want."""
        return self.rounds(unit, float(tokens * self.choices))

    def waiting_bytes(self, tokens: int, hidden_bytes: int) -> int:
        """Return the bytes of a seat of so many tokens while it waits within a block: hidden states, routers' scores and the
        loop's mask. Hidden states count as they came in, normed, summed so far, and as the shared experts' result. The mask of
        places has 64-bit numbers.
        """
        most = max(self.figures.num_experts)
        return 5 * hidden_bytes + tokens * (most * 8 + self.choices * (most + 3) * 8)

    @property
    def all_rounds(self) -> int:
        """Number of rounds of a pass that wants all experts."""
        return sum(self.rounds(unit, float(count)) for unit, count in enumerate(self.figures.num_experts))

    def describe(self, tokens: int) -> str:
        """Return words about how experts come to a pass over so many tokens."""
        counts = self.figures.num_experts
        most = max(counts)
        wanted = touched(most, self.choices, tokens)
        cached = f", {self.cached} of {sum(counts)} stay in host memory" if self.cached else ""
        how = "all read ahead" if self.is_ahead(tokens) else "read once routers have chosen"
        return (
            f"single, {self.in_round} at a time: one token of each row is likely to use {wanted:.3g} of {most} in a block, "
            f"{how}{cached}"
        )

    @property
    def cached_share(self) -> float:
        """The share of all experts that is in host memory."""
        return min(1.0, self.cached / max(1, sum(self.figures.num_experts)))

    @property
    def device_share(self) -> float:
        """The share of all experts that stays where compute reads them."""
        return min(1.0, self.on_device / max(1, sum(self.figures.num_experts)))

    @property
    def slot_bytes(self) -> int:
        """Bytes of an expert as it is read, in whole pages."""
        return round_up(self.figures.stored_bytes, PAGE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParts(ExpertPlan):
    """How experts come in training, where they are parts: once for `together` micro-batches, forward and backward.

    Those that are trained belong to the state of their units, and come from their units in host memory. A round is then of
    certain experts. On a separate device `commons` are, by unit, which elements the slot without experts has. With `remakes` a
    micro-batch waits in backward without its graph, and is recomputed once more when its experts have been there.
    """

    policy: str = "keep-all"  # a step wants each block's experts twice, in an order that is known
    together: int = 1
    remakes: bool = False
    is_trained: bool = False
    commons: tuple[Runs, ...] = ()


def note_on_parts(tier: str, needed_bytes: int) -> str:
    """Return a note for a person: why experts are parts, where whole blocks need so much of a tier's memory."""
    why = f"with whole blocks {format_bytes(needed_bytes)} of {tier} memory"
    return f"experts come one at a time, beside their blocks: {why}; the forecast takes all experts to be equally likely"


def expert_buffers(plan: ExpertPlan, weight: Plane, *, separate: bool) -> dict[str, BufferGroup]:
    """Return by name the groups of buffers for experts. A buffer holds one."""
    figures, count = plan.figures, plan.in_round
    slot_bytes = round_up(weight.num_bytes(figures.elements), PAGE_BYTES)
    groups = {}
    if not (isinstance(plan, ExpertParts) and plan.is_trained):
        groups["experts"] = BufferGroup("host", "weights", ROUNDS_IN_MEMORY * count, plan.slot_bytes)
        groups["cached_experts"] = BufferGroup("host", "weights", plan.cached, plan.slot_bytes)
    if separate or figures.is_made:
        tier = "device" if separate else "host"
        groups["device_experts"] = BufferGroup(tier, "weights", ROUNDS_IN_MEMORY * count, slot_bytes)
        groups |= {"kept_device_experts": BufferGroup(tier, "weights", plan.on_device, slot_bytes)} if plan.on_device else {}
    if separate and figures.is_made:
        groups["expert_sources"] = BufferGroup("device", "weights", SOURCE_SLOTS * count, plan.slot_bytes)
    return groups


def experts_in_round(num_experts: int) -> int:
    """Return how many experts come together, so that no block has too many rounds."""
    return -(-num_experts // MOST_ROUNDS)
