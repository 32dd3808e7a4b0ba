"""The question that a plan answers. `headrace plan`, `headrace train` and the engine build it here.

Invariant: all of them count the same bytes for libraries, whatever a process has done before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.model import Chain
from headrace.model.by_rows.block_tables import by_rows
from headrace.model.by_rows.embedding_rows import head_range_bytes
from headrace.plan.search.problem import Problem
from headrace.plan.search.staging import stage_problem
from headrace.plan.value.allowance import Allowance
from headrace.plan.value.block_tables import asked_tables
from headrace.plan.value.expert_plan import ExpertParts
from headrace.plan.value.stage_place import StagePlace
from headrace.plan.value.workload import Workload
from headrace.terms.block_parts import BlockParts, no_parts
from headrace.terms.costs import ModelCosts
from headrace.terms.embedding_rows import BlockRows, EmbeddingRows
from headrace.terms.forms import Form
from headrace.terms.grouping import Grouping
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.options.options import Options
from headrace.terms.packed_rows import PackedRows
from headrace.terms.rule_figures import RuleFigures
from headrace.update import optimizer_of
from headrace.update.tables.table_rows import row_layout
from headrace.update.wires import DenseWire, wire_of
from headrace.update.wires.wire import Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelToPlan:
    """What a plan depends on of a model, whose units have these `forms`.

    `own_rule` is the rule for trained families. Rows of the `embedding` can be read one by one (None: they cannot). With an
    `own_head` the head's matrix is in the last unit, all of it here. `experts` are those that are parts; `cuts` says how blocks
    can come in parts. Without `by_parts` units come whole, whatever the model is.
    """

    chain: Chain
    forms: tuple[Form, ...]
    rule: RuleFigures
    own_rule: RuleFigures | None = None
    experts: ExpertParts | None = None
    embedding: EmbeddingRows | None = None
    own_head: bool = False
    cuts: Callable[[], BlockParts | None] = no_parts
    by_parts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of the planner. `offered_bytes`: the most that its variants may ask for, by tier; None: unknown. `place` is
    that of a stage, whose part alone is planned.
    """

    workload: Workload
    allowance: Allowance
    compute_dtype: str = "bfloat16"
    gradient_dtype: str | None = None
    optimizer: Optimizer
    wire: Wire = field(default_factory=DenseWire)
    offered_bytes: dict[str, int] | None = None
    place: StagePlace | None = None

    @classmethod
    def of(
        cls,
        options: Options,
        allowance: Allowance,
        *,
        tokens_per_step: int,
        sequence_length: int,
        grouping: Grouping | None = None,
        packed: PackedRows | None = None,
        head_passes: int | None = None,
        **more: Any,
    ) -> "Question":
        """Return the question for a step of so many tokens under `options`, whose sums are taken as `grouping` says, and
        whose rows begin as `packed` says. With `head_passes` 2 the loss is one of the whole step, as where options name one.
        """
        workload = Workload(
            tokens_per_step=tokens_per_step,
            sequence_length=sequence_length,
            clip=options.max_grad_norm is not None,
            checkpoint_every=options.checkpoint_every,
            grouping=grouping,
            gradient_sum=options.gradient_sum,
            packed=packed,
            head_passes=head_passes or (2 if options.loss else 1),
        )
        return cls(
            workload=workload,
            allowance=allowance,
            compute_dtype=options.compute_dtype,
            gradient_dtype=options.gradient_dtype,
            optimizer=optimizer_of(options),
            wire=wire_of(options),
            **more,
        )

    def problem(self, model: ModelToPlan, costs_of: Callable[[int], ModelCosts]) -> Problem:
        """Return the question about a model, whose costs are by rows of a micro-batch."""
        whole = Problem(
            forms=model.forms,
            own_rule=model.own_rule,
            costs_of=costs_of,
            workload=self.workload,
            allowance=with_tables(self.allowance, model.forms, model.own_rule, self.workload),
            compute_dtype=self.compute_dtype,
            gradient_dtype=self.gradient_dtype,
            rule=model.rule,
        )
        problem = stage_problem(whole, self.place) if self.place else whole
        if not model.by_parts:
            return problem
        problem = with_block_tables(problem, by_rows(model.chain))
        problem = replace(
            problem,
            experts=model.experts,
            cuts=model.cuts,
            own_head=model.own_head,
            head_range_bytes=head_range_bytes(model.chain),
        )
        return with_embedding(problem, model.embedding)

    @property
    def allowed_bytes(self) -> dict[str, int]:
        """The bytes that may be used, by tier, where they are known."""
        allowance = self.allowance
        allowed = {"device": allowance.device_bytes, "host": allowance.host_bytes, "ssd": allowance.ssd_bytes}
        return {tier: size for tier, size in allowed.items() if size is not None}

    def may_ask_for(self, tier: str, num_bytes: int) -> bool:
        """Return whether a variant may ask for so many bytes of a tier: no more than this machine can give."""
        most = (self.offered_bytes or {}).get(tier)
        return most is None or num_bytes <= most

    def with_bytes(self, tier: str, num_bytes: int) -> "Question":
        """Return the question with another budget for one tier."""
        changes: dict[str, Any] = {f"{tier}_bytes": num_bytes}
        return replace(self, allowance=replace(self.allowance, **changes))

    def with_workload(self, **changes: Any) -> "Question":
        """Return the question with another workload."""
        return replace(self, workload=replace(self.workload, **changes))


def with_embedding(problem: Problem, embedding: EmbeddingRows | None) -> Problem:
    """Return a problem in which rows of `embedding` can be read; None: they cannot. If a table stands for it, they are.

    Rows of a table are read in both places of their page, and written to one.
    """
    table, rule = problem.forms[0].table, problem.own_rule
    if table is None or rule is None or embedding is None:
        return replace(problem, embedding=embedding)
    layout = row_layout(table.rows, table.width, rule.planes)
    embedding = replace(embedding, stored_bytes=2 * layout.page_bytes, learns=True)
    return replace(problem, embedding=embedding).saving(by_rows=True)


def with_block_tables(problem: Problem, tables: tuple[BlockRows, ...]) -> Problem:
    """Return a problem in which `tables` of blocks are read by rows; host memory holds the rows of trained ones for a step."""
    rule, workload, asked = problem.own_rule, problem.workload, list[BlockRows]()
    for each in tables:
        if (table := problem.forms[each.unit].table) is not None and rule is not None and each.table.learns:
            page_bytes = row_layout(table.rows, table.width, rule.planes).page_bytes
            each = replace(each, table=replace(each.table, stored_bytes=2 * page_bytes))  # both places of its page are read
        asked.append(each)
    problem = replace(problem, tables=tuple(asked))
    if rule is None or not any(each.table.learns for each in asked):
        return problem
    forms = list(problem.forms)
    for each in asked_tables(asked, problem.costs_of(1)):
        if (table := forms[each.unit].table) is not None:
            forms[each.unit] = replace(forms[each.unit], table=replace(table, top=each.ids))
    return replace(problem, allowance=with_tables(problem.allowance, forms, rule, workload))


def with_tables(allowance: Allowance, forms: Sequence[Form], own_rule: RuleFigures | None, workload: Workload) -> Allowance:
    """Return the allowance of a run with the tables of `forms`, whose rows `own_rule` updates."""
    tables = [form.table for form in forms if form.table is not None]
    if not tables or own_rule is None:
        return allowance
    planes, waiting = own_rule.planes, 1 + (workload.checkpoint_every or 1)
    states = sum(plane.bytes_per_element for plane in planes.states)
    return replace(
        allowance,
        table_bytes=sum(table.held_bytes(workload.tokens_per_step, states, waiting) for table in tables),
        table_drive_bytes=sum(row_layout(table.rows, table.width, planes).file_bytes for table in tables),
    )
