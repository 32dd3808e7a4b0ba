"""What tables take whose rows are read and updated one by one: memory for those that a step touches, and all on the drives."""

from collections.abc import Sequence
from dataclasses import replace

from headrace.plan.search.problem import Problem
from headrace.plan.value.allowance import Allowance
from headrace.plan.value.block_tables import asked_tables
from headrace.plan.value.workload import Workload
from headrace.terms.embedding_rows import BlockRows, EmbeddingRows
from headrace.terms.forms import Form
from headrace.terms.rule_figures import RuleFigures
from headrace.update.tables.table_rows import row_layout


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
