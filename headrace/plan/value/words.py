"""A plan's choices in words, for people."""

from headrace.plan.value.expert_plan import ExpertParts
from headrace.plan.value.plan import Plan
from headrace.terms.sizes import format_bytes


def _stash_of(plan: Plan) -> str:
    homes = [f"{len(blocks)} on {tier}" for tier in ("device", "host", "ssd") if (blocks := plan.blocks_stashed_on(tier))]
    kept = sum(len(ordinals) for ordinals in plan.stash.kept)
    hosted = ", and all hidden states between blocks in host memory" if plan.hosted else ""
    of_outputs = f"{kept} operator outputs kept ({format_bytes(_kept_total(plan))} a step)"
    return f"inputs of blocks: {', '.join(homes)}{hosted}; {of_outputs}"


def _cached_of(plan: Plan) -> str:
    experts = plan.experts
    return f"; {experts.cached} of {sum(experts.figures.num_experts)} experts, too" if experts and experts.cached else ""


def _experts_of(experts: ExpertParts) -> str:
    waits = "; blocks are recomputed twice, so that no graph waits there" if experts.remakes else ""
    return f"{experts.in_round} at a time, each for {_count_of(experts.together, 'micro-batch', 'es')}{waits}"


def _count_of(number: int, noun: str, plural: str) -> str:
    return f"{number} {noun}{plural if number > 1 else ''}"


def explain_update(plan: Plan) -> str:
    """Return when updates run, and where."""
    return _policy_of(plan) + (f"; {_device_updates_of(plan)}" if plan.device_state_slots else "")


def _device_updates_of(plan: Plan) -> str:
    every = plan.updates.device_every
    return "all on the device" if every == 1 else f"one chunk of {every} on the device"


def _policy_of(plan: Plan) -> str:
    held = f", gradients held on {plan.gradients.held}"
    if plan.updates.policy == "deferred":
        return f"deferred, behind forward{held}"
    if plan.updates.policy == "rerun":
        return "behind backward, no gradient held; a step that must be clipped runs again, which doubles its time"
    late = f", {len(plan.updates.late_units)} of {len(plan.units)} units behind forward" if plan.updates.late_units else ""
    return f"{plan.updates.policy}, behind backward{late}{held if late or plan.updates.policy == 'speculative' else ''}"


def _kept_total(plan: Plan) -> int:
    return sum(plan.stash.kept_bytes) * plan.batch.num_micro_batches


def explain_step(plan: Plan) -> str:
    """Return the tokens of a step, and the micro-batches that it is cut into."""
    batch = plan.batch
    count = _count_of(batch.num_micro_batches, "micro-batch", "es")
    return f"{batch.tokens_per_step} tokens = {count} of {batch.micro_batch_sequences} x {batch.sequence_length}"


def explain_plan(plan: Plan) -> str:
    """Return the plan's choices in words, and its peaks in one line for each tier."""
    updates = plan.updates
    lines = [
        f"model    {_count(plan.num_parameters)} parameters, {plan.num_blocks} blocks, {plan.compute_dtype} compute"
        + f", {plan.rule.name}",
        f"step     {explain_step(plan)}",
        f"update   {explain_update(plan)}; "
        f"every {'step' if updates.checkpoint_every == 1 else f'{updates.checkpoint_every} steps'} a checkpoint",
        f"threads  {plan.compute_threads} for compute, {updates.threads} for updates",
        f"slots    {plan.host_slots} blocks in host memory"
        + (f", {plan.device_slots} on the device" if plan.separate_device else "")
        + (", where weights come in pages" if plan.batch.pages else "")
        + f"; states of {len(updates.resident_states)} of {len(plan.units)} units in memory{_cached_of(plan)}",
        f"replay   {_stash_of(plan)}",
    ]
    if plan.experts is not None:
        lines.append(f"experts  {_experts_of(plan.experts)}")
    if plan.parts is not None:
        width, leaving = plan.planes.weight.bytes_per_element, plan.leaving_elements > 0
        lines.append(f"parts    {plan.parts.describe(width, plan.batch.num_micro_batches, leaving=leaving)}")
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
