"""What tables take whose rows are read and updated one by one: memory for those that a step touches, and all on the drives."""

from collections.abc import Sequence
from dataclasses import replace

from headrace.plan.allowance import Allowance
from headrace.plan.space import Problem
from headrace.plan.workload import Workload
from headrace.terms.embedding_rows import EmbeddingRows
from headrace.terms.forms import Form
from headrace.terms.rule_figures import RuleFigures
from headrace.update.table_rows import row_layout


def with_embedding(problem: Problem, embedding: EmbeddingRows | None) -> Problem:
    """Return a problem in which rows of `embedding` can be read; None: they cannot. If a table stands for it, they are.

    Rows of a table are read in both places of their page, and written to one.
    """
    table, rule = problem.forms[0].table, problem.own_rule
    if table is None or rule is None or embedding is None:
        return replace(problem, embedding=embedding)
    layout = row_layout(table.rows, table.width, rule.planes)
    return replace(problem, embedding=replace(embedding, stored_bytes=2 * layout.page_bytes, learns=True), by_rows=True)


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
