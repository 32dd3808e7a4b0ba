"""What tables within blocks cost a step whose rows are read as blocks ask for them: bytes, host memory, and waiting.

Rows of a frozen table are read in forward, and again in recompute. Those that are trained are held from forward on.
"""

from collections.abc import Sequence
from dataclasses import replace

from headrace.plan.value.plan import Plan
from headrace.terms.costs import ModelCosts
from headrace.terms.embedding_rows import BlockRows, TableFigures
from headrace.terms.machine.ceilings import Ceilings


def asked_tables(tables: Sequence[BlockRows], costs: ModelCosts) -> tuple[BlockRows, ...]:
    """Return tables of blocks, in the order of a block's own, with how many rows a token asks for."""
    tokens = costs.sequences * costs.length
    asked = {unit: iter(block.asked_rows) for unit, block in enumerate(costs.blocks, start=1)}
    return tuple(replace(each, ids=-(-next(asked[each.unit], 0) // tokens)) for each in tables)


def notes_on_tables(tables: Sequence[BlockRows], tokens: int) -> tuple[str, ...]:
    """Return for a person which tables are not in memory, and what a micro-batch of so many tokens reads."""
    return tuple(each.note(tokens) for each in tables)


def read_table_bytes(plan: Plan) -> int:
    """Return the most bytes of pages that a step reads."""
    times = ((1 if each.table.learns else 2, each) for each in plan.results.tables)
    return plan.batch.num_micro_batches * sum(count * each.read_bytes(plan.micro_batch_tokens) for count, each in times)


def written_table_bytes(plan: Plan) -> int:
    """Return the most bytes of pages that a step writes: those that it read, once, in one of two places."""
    return sum(each.read_bytes(plan.batch.tokens_per_step) // 2 for each in plan.results.tables if each.table.learns)


def most_rows_of(plan: Plan, tables: Sequence[TableFigures]) -> int:
    """Return the most rows of a table that a step updates; `tables` are those of all units."""
    tokens = plan.batch.tokens_per_step
    in_blocks = (each.rows(tokens) for each in plan.results.tables if each.table.learns)
    return max(0, *(table.touched(tokens) for table in tables), *in_blocks)


def held_table_bytes(plan: Plan) -> int:
    """Return the host memory that reading a table's rows takes, while a block runs on a micro-batch."""
    return max((each.held_bytes(plan.micro_batch_tokens) for each in plan.results.tables), default=0)


def with_waits(plan: Plan, ceilings: Ceilings) -> Plan:
    """Return a plan whose blocks wait for rows, as operations that take as long: in forward and recompute, which are two of the
    times that a block's forward counts.
    """
    if not plan.results.tables:
        return plan
    flops = list(plan.results.forward_flops)
    for each in plan.results.tables:
        waits = each.seconds(plan.micro_batch_tokens, ceilings.ssd_read_bytes_per_second)
        times, reads = 3 if plan.units[each.unit].is_beside else 4, 1 if each.table.learns else 2
        flops[each.unit] += reads / times * waits * ceilings.matrix_flops_per_second(plan.compute_dtype)
    return plan.with_results(forward_flops=tuple(flops))
