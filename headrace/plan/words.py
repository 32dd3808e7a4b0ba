"""A plan's choices in words, for people."""

from headrace.plan.plan import Plan
from headrace.terms.sizes import format_bytes


def _stash_of(plan: Plan) -> str:
    homes = [f"{len(blocks)} on {tier}" for tier in ("device", "host", "ssd") if (blocks := plan.blocks_stashed_on(tier))]
    kept = sum(len(ordinals) for ordinals in plan.kept)
    return f"inputs of blocks: {', '.join(homes)}; {kept} operator outputs kept ({format_bytes(_kept_total(plan))} a step)"


def explain_update(plan: Plan) -> str:
    """Return when updates run, and where."""
    return _policy_of(plan) + (f"; {_device_updates_of(plan)}" if plan.device_state_slots else "")


def _device_updates_of(plan: Plan) -> str:
    every = plan.device_update_every
    return "all on the device" if every == 1 else f"one chunk of {every} on the device"


def _policy_of(plan: Plan) -> str:
    held = f", gradients held on {plan.held_gradients}"
    if plan.update_policy == "deferred":
        return f"deferred, behind forward{held}"
    if plan.update_policy == "rerun":
        return "behind backward, no gradient held; a step that must be clipped runs again, which doubles its time"
    late = f", {len(plan.late_units)} of {len(plan.units)} units behind forward" if plan.late_units else ""
    return f"{plan.update_policy}, behind backward{late}{held if late or plan.update_policy == 'speculative' else ''}"


def _kept_total(plan: Plan) -> int:
    return sum(plan.kept_bytes) * plan.num_micro_batches


def explain_plan(plan: Plan) -> str:
    """Return the plan's choices in words, and its peaks in one line for each tier."""
    lines = [
        f"model    {_count(plan.num_parameters)} parameters, {plan.num_blocks} blocks, {plan.compute_dtype} compute"
        + f", {plan.rule.name}",
        f"step     {plan.tokens_per_step} tokens = {plan.num_micro_batches} micro-"
        f"batch{'es' if plan.num_micro_batches > 1 else ''} of {plan.micro_batch_sequences} x {plan.sequence_length}",
        f"update   {explain_update(plan)}; "
        f"every {'step' if plan.checkpoint_every == 1 else f'{plan.checkpoint_every} steps'} a checkpoint",
        f"threads  {plan.compute_threads} for compute, {plan.update_threads} for updates",
        f"slots    {plan.host_slots} blocks in host memory"
        + (f", {plan.device_slots} on the device" if plan.separate_device else "")
        + f"; states of {len(plan.resident_states)} of {len(plan.units)} units in memory",
        f"replay   {_stash_of(plan)}",
    ]
    if plan.freed_memory == "kept":
        lines.append("heap     freed memory is kept for the next operations")
    lines += plan.results.explain_peaks()
    if plan.results.speculation:
        lines.append(f"clipping {plan.results.speculation.explain()}")
    lines += [f"note     {note}" for note in plan.results.notes]
    return "\n".join(lines)


def _count(number: int) -> str:
    for factor, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g} {letter}"
    return str(number)
