"""What a plan is searched for: a model, what is trained of it, a step, and the memory that it may take."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from headrace.plan.value.allowance import Allowance
from headrace.plan.value.expert_plan import ExpertParts
from headrace.plan.value.replaying import operators_of, replay_order
from headrace.plan.value.stage_place import StagePlace
from headrace.plan.value.workload import Workload
from headrace.terms.block_parts import BlockParts, no_parts
from headrace.terms.costs import ModelCosts
from headrace.terms.embedding_rows import BlockRows, EmbeddingRows
from headrace.terms.forms import DEVICE, Form, UnitFigures
from headrace.terms.packed_rows import Groups
from headrace.terms.rule_figures import RuleFigures

# How a note on groups of packed rows begins.
OF_GROUPS = "packed rows run in groups of samples of one length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """Ways to save memory at a price of time: a search asks for them one after the other."""

    hosted: bool = False  # hidden states wait in host memory between blocks
    by_rows: bool = False  # rows of the embedding are read in the model's files
    head_is_loaded_for_loss: bool = False  # compute has the head's matrix during the loss only
    head_in_row_ranges: bool = False  # and of that a range of rows at a time
    remakes: bool = False  # see `ExpertParts`
    parts: BlockParts | None = None  # blocks come in these
    one_block_in_host_memory: bool = False
    paged: bool = False  # weights come in pages (`paging`)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model whose units have these `forms`, to be trained within `allowance`."""

    forms: tuple[Form, ...]
    costs_of: Callable[[int], ModelCosts]  # of a micro-batch, by its sequences
    workload: Workload
    allowance: Allowance
    rule: RuleFigures
    own_rule: RuleFigures | None = None  # for trained families of their own; None where no unit has one
    compute_dtype: str = "bfloat16"
    gradient_dtype: str | None = None
    experts: ExpertParts | None = None  # experts that are parts; how many come together is left open
    attention_share: float = 1.0  # the share of the matrix rate that attention's products reach (`Ceilings`)
    embedding: EmbeddingRows | None = None  # whose rows can be read in the model's files
    tables: tuple[BlockRows, ...] = ()  # those of blocks whose rows are read; how many a token asks for is left open
    own_head: bool = False  # the last unit has the head's matrix
    head_range_bytes: int = 0  # of a slot for a range of its rows; 0: it cannot come so
    place: StagePlace | None = None  # of a stage, whose part of a model this is
    cuts: Callable[[], BlockParts | None] = no_parts  # how blocks can come in parts; None: they cannot
    savings: Savings = Savings()

    def saving(self, **changes: Any) -> "Problem":
        """Return the problem with other savings."""
        return replace(self, savings=replace(self.savings, **changes))

    @cached_property
    def units(self) -> tuple[UnitFigures, ...]:
        """The model's units as plans have them."""
        units = tuple(form.figures for form in self.forms)
        return self.place.units_of(units) if self.place else units

    @cached_property
    def replay_order(self) -> Callable[[int], list[tuple[int, int]]]:
        """`replay_order` by the rows of a micro-batch. Each is computed once, because every choice asks for it."""
        return cache(lambda rows: replay_order(self.costs_of(rows), self.attention_share))

    @cached_property
    def operators(self) -> Callable[[int], tuple[tuple[str, ...], ...]]:
        """`operators_of` by the rows of a micro-batch, each computed once."""
        return cache(lambda rows: operators_of(self.costs_of(rows)))

    @cached_property
    def groups(self) -> Callable[[int], tuple[Groups | None, tuple[str, ...]]]:
        """The groups of packed rows, and what to say of them, by the rows of a micro-batch; each is counted once."""
        return cache(lambda rows: groups_of(self.costs_of(rows), self.workload))

    @property
    def separate_device(self) -> bool:
        """Whether there is a device budget."""
        return self.allowance.device_bytes is not None

    @property
    def can_host(self) -> bool:
        """Whether hidden states may wait in host memory between blocks: of several micro-batches, on a device, of no stage."""
        return self.place is None and self.separate_device and self.workload.sequences > 1

    @property
    def has_rows(self) -> bool:
        """Whether rows of the embedding can be read: nothing of its unit is trained, and all of it is here."""
        unit = self.units[0]
        stays = unit.home == DEVICE and not unit.is_trained and not unit.is_made
        return self.embedding is not None and self.place is None and stays

    @property
    def head_may_visit(self) -> bool:
        """Whether compute may have the head for the loss only: nothing of its unit is trained, and all of it is here."""
        unit = self.units[-1]
        stays = unit.home == DEVICE and not unit.is_trained and not unit.is_made
        return self.own_head and self.place is None and stays

    @property
    def head_may_come_by_ranges(self) -> bool:
        """Whether a head that visits may come range by range: a step passes it once, and it has no gradient."""
        return self.head_may_visit and self.head_range_bytes > 0 and self.workload.head_passes == 1

    @property
    def head_home(self) -> str:
        """Where the weights of a head lie that visits."""
        return "host" if self.separate_device else "ssd"

    @property
    def clips(self) -> bool:
        """Whether the global norm must be known before updates count; for float16 also to see whether the step overflowed."""
        return self.workload.clip or self.compute_dtype == "float16"

    @property
    def policies(self) -> tuple[str, ...]:
        """When updates may run, the usual policy first: without clipping they need not wait for the norm, but may (`Plan`)."""
        if not self.clips:
            return ("immediate",) if self.place else ("immediate", "deferred")  # all stages commit at the same time
        # What lives at another site cannot be taken back by running a step again.
        far = any(unit.is_far for unit in self.units) and not self.place
        return ("rerun",) if self.rule.clips_by_rerun and not far else ("deferred",)

    @property
    def homes(self) -> tuple[str, ...]:
        """Where block inputs and kept outputs may wait, nearest first."""
        if self.savings.hosted:
            return "host", "ssd"
        return ("device", "host", "ssd") if self.separate_device else ("device", "ssd")


def groups_of(costs: ModelCosts, workload: Workload) -> tuple[Groups | None, tuple[str, ...]]:
    """Return the groups in which the packed rows of a micro-batch run, and a note; None and () where one call takes all."""
    if not costs.by_exact_lengths:
        return None, ()
    packed = workload.packed
    if packed is None or packed.sequence_length != workload.sequence_length:
        return None, (f"{OF_GROUPS}: how many is unknown without the data; times count one a micro-batch",)
    groups = packed.groups(costs.sequences, workload.sequences)
    return groups, (f"{OF_GROUPS}: {groups.calls:.3g} a micro-batch, on average",) if groups else ()
