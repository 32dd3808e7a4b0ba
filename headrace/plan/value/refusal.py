"""The words in which a plan that does not fit is refused: which tier, what is needed and allowed, and what would help."""

from headrace.plan.value.placement import Placement
from headrace.terms.errors import PlanInfeasible
from headrace.terms.sizes import MIB, format_bytes, round_up


def refusal(plan: Placement, needs: str, instead: str, found: str = "") -> PlanInfeasible:
    """Return the refusal of a plan that exceeds tiers, for the one that is shortest.

    `needs` says who needs `{}` bytes, `instead` what would help beside more memory; `found` is a sentence between.
    """
    excess = plan.excess_bytes
    # Memory comes first: where it is short, no amount of space makes up for it.
    tier = max([name for name in excess if name != "ssd"] or excess, key=lambda name: excess[name])
    needed, allowed = plan.peak(tier), plan.results.allowed_bytes[tier]
    asked, most = needs.format(format_bytes(needed)), format_bytes(allowed)
    if tier == "ssd":
        words = f"ssd: {asked}, {most} may be used; free some space, or add a drive with another --ssd"
    else:
        largest_first = sorted(plan.results.peak_bytes[tier].items(), key=lambda row: -row[1])
        rows = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest_first if size)
        enough = f"{round_up(needed, 64 * MIB) // MIB}MiB"
        words = (
            f"{tier} memory: {asked}, {most} are allowed ({rows}). {found}Give --{tier}-memory {enough} or more, or {instead}"
        )
    return PlanInfeasible(words, tier=tier, needed_bytes=needed, allowed_bytes=allowed)


def least_of(first: PlanInfeasible, *others: PlanInfeasible) -> PlanInfeasible:
    """Return what asks for least among refusals of one question: of the tier of which the first was short."""
    alike = [each for each in others if each.tier == first.tier]
    return min([first, *alike], key=lambda each: each.needed_bytes)


def with_whole_blocks(refused: PlanInfeasible, why: str) -> PlanInfeasible:
    """Return a refusal that also says `why` experts cannot come one at a time; "": the model has none."""
    if not why or refused.tier == "ssd":
        return refused
    words = f"{refused}. Its experts cannot come one at a time, which would take less: {why}"
    return PlanInfeasible(words, tier=refused.tier, needed_bytes=refused.needed_bytes, allowed_bytes=refused.allowed_bytes)
