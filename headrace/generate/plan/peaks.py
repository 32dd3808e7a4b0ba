"""The peak bytes of a generation's plan, for each tier and purpose, and whether they are within the budgets."""

from dataclasses import replace

from headrace.generate.plan.block_tables import held_bytes
from headrace.generate.plan.cache_plan import COMPUTE, SSD, cache_drive_bytes, whole_bytes, working_bytes
from headrace.generate.plan.plan import GenerationPlan, generation_buffers, weight_buffers
from headrace.plan.value.allowance import Allowance
from headrace.plan.value.results import Results
from headrace.plan.value.weight_sizes import peak_rows
from headrace.terms.sizes import KEPT_FREE_BYTES, MIB

_SEAT_BYTES = MIB // 2
_SMALL_BYTES = 16 * MIB
_OPERATION_BYTES = 1200
# A seat's block has so many times the operations where the host attends.
ATTENDING_OPERATIONS = 3


def with_peaks(plan: GenerationPlan, allowance: Allowance) -> GenerationPlan:
    """Return `plan` with its peak bytes per tier and purpose filled in."""
    costs, threads = plan.most_costs, plan.seats
    rows = peak_rows(generation_buffers(plan), allowance.runtime_bytes, separate_device=plan.separate_device)
    compute = rows["device" if plan.separate_device else "host"]
    blocks = range(1, plan.num_blocks + 1)
    grows = [block for block in blocks if plan.caches.home(block) == COMPUTE and not costs.is_coded(block)]
    kept = sum(whole_bytes(costs, plan.new_tokens, block) for block in grows)
    compute["cache"] = compute.get("cache", 0) + plan.seats * kept
    passing = max(costs.first.call_bytes + 2 * costs.first.hidden_bytes, costs.next.call_bytes + 2 * costs.next.hidden_bytes)
    again = costs.recomputing.call_bytes if costs.recomputing is not None and plan.caches.inputs else 0
    compute["activations"] = plan.seats * (passing + again)
    # A block's cache is copied when it grows, and both exist for a moment. A cache that is lent memory exists once.
    last = (working_bytes(costs, plan.new_tokens, block) * (2 if block in grows else 1) for block in blocks)
    before = costs.first.call_bytes + 3 * costs.first.hidden_bytes
    compute["workspace"] = max(costs.first.workspace_bytes, costs.next.workspace_bytes + max(last), costs.head_bytes, before)
    making = max(unit.making_bytes for unit in plan.units)
    if plan.experts is not None:
        making = max(making, plan.experts.figures.making_bytes)
        compute["waiting for experts"] = plan.seats * plan.experts.waiting_bytes(plan.most_tokens, costs.first.hidden_bytes)
    if making:
        compute["decoding"] = making
    if plan.packs:
        compute["packed"] = sum(unit.packing_bytes for unit in plan.units[1 : plan.num_blocks + 1])
    if plan.adapter_bytes:
        compute["adapters"] = plan.adapter_bytes
    on_cpu = not allowance.device_overhead_bytes
    if plan.prefixes is not None:
        rows["host"]["prefixes"] = plan.prefixes.memory_bytes
    rows["host"]["seats"] = threads * _SEAT_BYTES
    if held := held_bytes(costs):
        rows["host"]["rows of tables in blocks"] = held
    rows["host"]["libraries"] = _SMALL_BYTES
    rounds = plan.experts.all_rounds if plan.experts is not None else 0
    each = bool(plan.caches.inputs) + 2 * (ATTENDING_OPERATIONS if plan.caches.attends else 1)
    rows["host"]["program"] = 4 * (plan.num_blocks * (each * plan.seats + 3) + 4 * rounds) * _OPERATION_BYTES
    if on_cpu:
        rows["host"]["freed blocks"] = _SMALL_BYTES + min(compute["workspace"] // 2, KEPT_FREE_BYTES)
    else:
        rows["device"]["libraries"] = allowance.device_overhead_bytes + sum(
            compute[name] // 4 for name in ("cache", "activations", "workspace")
        )
    if on_drives := sum(cache_drive_bytes(plan.caches, costs, plan.new_tokens, block) for block in plan.caches.blocks(SSD)):
        rows["ssd"] = {"cache": plan.seats * on_drives}
    if plan.prefixes is not None and plan.prefixes.ssd_bytes:
        rows["ssd"] = {**rows.get("ssd", {}), "prefixes": plan.prefixes.ssd_bytes}
    return replace(plan, results=Results(peak_bytes=rows, allowed_bytes=allowance.of(rows), notes=plan.results.notes))


def with_weights(plan: GenerationPlan, allowance: Allowance) -> GenerationPlan:
    """Return `plan`, whose peaks were found for other numbers of slots or cached experts, with those of its own."""
    rows = {tier: dict(purposes) for tier, purposes in plan.results.peak_bytes.items()}
    groups = weight_buffers(plan).values()
    for tier in {group.tier for group in groups}:
        rows[tier]["weights"] = sum(group.total_bytes for group in groups if group.tier == tier)
    if plan.packs:
        rows["host"]["packed"] = sum(unit.packing_bytes for unit in plan.units[1 : plan.num_blocks + 1])
    return replace(plan, results=replace(plan.results, peak_bytes=rows, allowed_bytes=allowance.of(rows)))
