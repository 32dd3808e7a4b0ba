"""What the operations of one step share: the parts of the engine, and the step's own tensors and results."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from headrace.flow.step.step_batch import StepBatch
from headrace.flow.weights.buffers import Buffers
from headrace.flow.weights.expert_sums import ExpertSums
from headrace.flow.weights.experts import Experts
from headrace.flow.weights.gradient_sums import SequentialSums, sums_of
from headrace.flow.weights.places import TensorPlace
from headrace.flow.weights.ranged_head import RangedHead
from headrace.flow.weights.weights import WeightSource
from headrace.losses import Outcome, TokenLoss
from headrace.machine.protocol import Machine
from headrace.model import Chain
from headrace.model.parts.parted_experts import Walk
from headrace.model.streams.block_parts import CutBlocks
from headrace.plan.value.plan import Plan
from headrace.store import StateStore
from headrace.terms.cuts import pieces_of
from headrace.terms.events import Sink
from headrace.terms.forms import Form
from headrace.terms.layout import GroupRange, UnitLayout
from headrace.terms.program import Op
from headrace.update import Checksums, DeviceUpdater, LossScale, StepScalars, Updater
from headrace.update.sites.site import Site
from headrace.update.tables.table_rows import ROWS, TableRows
from headrace.update.wires.wire import Proposal, Wire


@dataclass(frozen=True, slots=True)
class PartedUnits:
    """What brings units of which compute has a part at a time; None for those that come whole."""

    experts: Experts | None = None
    sums: ExpertSums | None = None  # of gradients, where experts are trained
    cut: CutBlocks | None = None  # blocks whose weights come in parts
    head: RangedHead | None = None  # one that comes range by range


@dataclass(frozen=True)
class Parts:
    """The engine's parts, the same for every step."""

    plan: Plan
    chain: Chain
    machine: Machine
    buffers: Buffers
    store: StateStore
    source: WeightSource
    updater: Updater
    forms: tuple[Form, ...]
    wire: Wire
    site: Site | None
    seed: int
    sink: Sink
    own_updater: Updater | None = None  # for trained families of their own
    device_updater: DeviceUpdater | None = None  # where the plan updates chunks on the device
    workers: Any = None  # at a node (`flow.step.serve.Workers`)
    peers: Any = None  # where ranks share out every unit (`flow.step.shards.Peers`)
    line: Any = None  # where stages have blocks of their own (`peers.stages.line.Line`)
    token_loss: TokenLoss | None = None  # a loss of the whole step
    rows: TableRows | None = None  # of tables that are updated row by row
    parted: PartedUnits = PartedUnits()

    @cached_property
    def pieces(self) -> tuple[Sequence[GroupRange], ...]:
        """By unit: the pieces of its trained elements, as the rule gets them."""
        return tuple(pieces_of(form.trained, self.plan.rule) if form.trained else () for form in self.forms)

    @property
    def far_site(self) -> Site:
        """The site where far units live, for a run that has some."""
        assert self.site is not None, "a plan with far units comes with their site"
        return self.site

    def commit(self, verdict: "Verdict") -> None:
        """Make the step of `verdict` durable: first at the site, which can go back by one step."""
        if self.site is not None:
            self.site.commit(verdict.step + 1)
        if self.rows is None:
            self.store.commit(verdict.record(verdict))
            return
        sealed = self.rows.seal(max(verdict.updates_after))
        self.store.commit({**verdict.record(verdict), ROWS: sealed})
        self.rows.committed()


@dataclass
class Verdict:
    """What becomes of a step's gradients. `decide` fills it in; the update and the commit read it.

    `gradient_scale` is the clip factor over the loss scale; `record` makes the commit's payload, once that is known.
    """

    step: int
    updates: tuple[int, ...]  # by unit: how many were applied before this step
    learning_rate: float
    gradient_scale: float
    loss_scale: LossScale | None
    max_grad_norm: float | None
    durable: bool  # whether this step is a checkpoint
    record: Callable[["Verdict"], dict[str, Any]]
    grad_norm: float = 0.0
    skipped: str | None = None
    clipped: bool = False
    missed: bool = False  # speculative: updates were begun with a factor that turned out wrong
    redone: bool = False  # and were done again
    proposals: dict[int, Proposal] = field(default_factory=dict)  # by unit: a new basis for what is trained

    @property
    def estimation_errors(self) -> dict[str, tuple[float, float | None]]:
        """The errors of those projectors that the step looked at, and of new ones where they were tried."""
        return {name: errors for each in self.proposals.values() for name, errors in each.errors.items()}

    @property
    def void(self) -> bool:
        """Whether the effects of updates are thrown away."""
        return self.missed or self.skipped is not None

    @property
    def is_hit(self) -> bool:
        """Whether updates could have started before the norm was known."""
        return self.skipped is None and not self.clipped

    @property
    def updates_after(self) -> tuple[int, ...]:
        """By unit: how many updates are applied after this step."""
        return tuple(count + (self.skipped is None) for count in self.updates)

    def scalars_of(self, unit: int) -> StepScalars:
        """Return what a unit's update gets besides its gradient. Units count their own updates."""
        return StepScalars(learning_rate=self.learning_rate, update=self.updates[unit] + 1, gradient_scale=self.gradient_scale)


@dataclass
class AtExperts:
    """What waits within the block that is computed, while its experts come; by micro-batch."""

    walks: dict[int, Walk] = field(default_factory=dict)
    recomputed: dict[int, Any] = field(default_factory=dict)
    _beside: tuple[int, torch.Tensor] | None = None

    def beside(self, unit: int, trained: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return what is trained beside a unit where compute reads it: one copy for all micro-batches that wait in the unit."""
        if self._beside is None or self._beside[0] != unit:
            self._beside = None  # there is room for one
            self._beside = unit, trained.to(device)
        return self._beside[1]

    def close(self) -> None:
        """End what waits, where it is."""
        for walk in self.walks.values():
            walk.close()
        self.walks.clear()
        self.recomputed.clear()
        self._beside = None


class _Hole:
    """Marks where a tensor was taken out of a package. It is not `None`, which some operators return among their outputs."""


HOLE = _Hole()


@dataclass(frozen=True, slots=True)
class Package:
    """What a block leaves for its backward: its input, kept operator outputs (ordinal -> operator, output), and the ordinals
    that recompute may skip.
    """

    hidden: torch.Tensor
    kept: Mapping[int, tuple[Any, Any]]
    skipped: frozenset[int] = frozenset()

    def like(self, change: Callable[[Any], Any]) -> "Package":
        """Return a package of the same structure with `change` applied to each tensor (or hole), in a fixed order.

        Tensors on another device than the block's input stay as they are: attention may keep its random state on the CPU.
        """
        here = self.hidden.device if isinstance(self.hidden, torch.Tensor) else None
        hidden = change(self.hidden)
        kept = {ordinal: (operator, _changed(out, change, here)) for ordinal, (operator, out) in self.kept.items()}
        return Package(hidden, kept, self.skipped)


def _changed(value: Any, change: Callable[[Any], Any], here: torch.device | None) -> Any:
    # It is no function inside `like`: one that calls itself is a reference cycle, which keeps the tensors until it is
    # collected.
    if value is HOLE or (isinstance(value, torch.Tensor) and value.device == here):
        return change(value)
    return tuple(_changed(item, change, here) for item in value) if isinstance(value, tuple) else value


@dataclass
class Left:
    """What forward leaves for backward, by unit and micro-batch, on its way through the stash."""

    packages: dict[tuple[int, int], Package] = field(default_factory=dict)  # made by forward
    layouts: dict[tuple[int, int], tuple[Package, list[Any]]] = field(default_factory=dict)  # of stash buffers
    recalled: dict[tuple[int, int], Package] = field(default_factory=dict)  # ready for backward
    not_kept: set[int] = field(default_factory=set)  # blocks that left only their input, though the plan keeps more


@dataclass
class Asides:
    """What blocks give besides hidden states, such as a router's logits, by unit and micro-batch: `outputs`, and later the
    `gradients` with them of the loss that is computed of all.
    """

    outputs: dict[tuple[int, int], tuple[torch.Tensor, ...]] = field(default_factory=dict)
    gradients: dict[tuple[int, int], tuple[torch.Tensor, ...]] = field(default_factory=dict)
    loss: torch.Tensor | None = None


@dataclass
class StepState:
    """One step: its batch, the tensors under way, its verdict and that of the step before.

    Lanes hand tensors to one another through these dictionaries; the program orders who puts and who takes.
    """

    parts: Parts
    batch: StepBatch
    verdict: Verdict
    pending: Verdict | None  # the verdict of the step before, if this step's program does updates of it
    first_micro: int = 0  # the first of the step's micro-batches that is computed here
    learns: bool = True  # whether a backward follows, which needs what forward leaves
    inputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # hidden states by (coming unit, micro-batch)
    calls: dict[int, Any] = field(default_factory=dict)  # micro-batch -> what each block is called with
    left: Left = field(default_factory=Left)
    hidden_gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    asides: Asides = field(default_factory=Asides)
    caught: dict[int, dict[str, torch.Tensor]] = field(default_factory=lambda: defaultdict(dict))  # by unit: what a wire keeps
    sums: SequentialSums = field(init=False)
    # By micro-batch: log-probabilities of labels, for a loss of the whole step; logits of rows that are scored without labels.
    scored: dict[int, torch.Tensor] = field(default_factory=dict)
    log_prob_gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # and what the loss gives back
    outcome: Outcome | None = None  # what that loss says
    loss_sum: torch.Tensor | None = None
    square_sums: dict[int, float] = field(default_factory=dict)
    square_blocks: dict[int, Any] = field(default_factory=dict)  # of the parts of gradients that this rank holds
    # By unit and chunk, from the update to its writes.
    checksums: dict[tuple[int, int], Checksums] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sums = sums_of(self.plan, self.parts.buffers, len(self.batch.micro_batches))

    @cached_property
    def at_experts(self) -> AtExperts:
        """What waits within a block whose experts are parts."""
        return AtExperts()

    @cached_property
    def on_host(self) -> dict[tuple[int, int], TensorPlace]:
        """How hidden states lie in host memory, by unit and micro-batch (`flow.step.hosted`)."""
        return {}

    @property
    def plan(self) -> Plan:
        """The run's plan."""
        return self.parts.plan

    @property
    def loss_multiplier(self) -> float:
        """The factor on the sum of token losses before backward: one over the trained tokens, times the loss scale."""
        scale = self.verdict.loss_scale.scale if self.verdict.loss_scale else 1.0
        return scale / self.batch.trained_tokens

    def updater_of(self, unit: int) -> Updater:
        """Return the updater of a unit on the host."""
        updater = self.parts.updater if self.plan.units[unit].in_place else self.parts.own_updater
        assert updater is not None, "a plan with trained families of their own comes with a rule for them"
        return updater

    def trained_layout(self, unit: int) -> UnitLayout:
        """Return the layout of a unit's gradients and states."""
        trained = self.parts.forms[unit].trained
        assert trained is not None, "a frozen unit has no gradient"
        return trained

    def summed_layout(self, unit: int) -> UnitLayout:
        """Return the layout of the gradients of a unit that are summed together."""
        parted = self.plan.experts is not None and self.plan.experts.is_trained
        return self.parts.chain.layouts[unit] if parted else self.trained_layout(unit)

    def verdict_of(self, op: Op) -> Verdict:
        """Return the verdict that counts for an update operation: a late one belongs to the step before."""
        if not op.late:
            return self.verdict
        assert self.pending is not None, "there are late updates only after a step"
        return self.pending
