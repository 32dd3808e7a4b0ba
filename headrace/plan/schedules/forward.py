"""A forward pass: from a plan to a program that scores rows, and changes nothing: no gradient, no update, no commit.

Weights come as for a training step, and the next program, of either kind, finds what slots hold.
"""

from headrace.plan.schedules.ledger import Snapshot
from headrace.plan.schedules.train import Training
from headrace.plan.value.plan import Plan
from headrace.terms.program import Program


def build_forward(plan: Plan, num_micro_batches: int, before: Snapshot, *, shared: bool = False) -> tuple[Program, Snapshot]:
    """Return the program of one pass over `num_micro_batches` micro-batches, and what it leaves behind.

    `before` may have no pending update, because a pass reads the newest weights. `shared`: see `Weights`.
    """
    schedule = Training(plan, num_micro_batches, before, shared=shared, learns=False)
    schedule.first_to_last()
    schedule.score()
    return schedule.ledger.finish()
