"""What a plan takes of each tier at its peak: buffers (exact, from `buffer_sizes`), tensors that compute makes, and the
interpreter.

The planner's promise rests on this module: measured peak <= planned peak, which is tested in real processes.
"""

from itertools import pairwise

from headrace.plan.schedules.train import RECALLED_AHEAD
from headrace.plan.value.allowance import RUNTIME_SPREAD, Allowance
from headrace.plan.value.block_tables import held_table_bytes
from headrace.plan.value.buffer_sizes import (
    buffer_groups,
    device_update_temporary_bytes,
    host_update_temporary_bytes,
    scratch_bytes,
)
from headrace.plan.value.plan import Plan
from headrace.plan.value.results import SAVING_ROW
from headrace.plan.value.weight_sizes import peak_rows
from headrace.terms.costs import ATTENTION, BlockCosts, ModelCosts
from headrace.terms.layout import rest_of_master
from headrace.terms.sizes import KEPT_FREE_BYTES, MAPPED_BYTES, MERGED_ELEMENTS, MIB

# Measured (docs/log/unplanned-memory): oneDNN keeps 0.7 to 1 MiB of code for each shape of a bfloat16 product. Lanes and
# programs leave 3 MiB, and freed tensors that are too small to go back to the kernel up to 11 MiB.
_KERNEL_BYTES = 3 * MIB // 4
_SMALL_BYTES = 16 * MIB
# Fragments that stay between blocks, if freed blocks are kept for reuse. Measured on S, M and L with huge pages for tensors,
# over the ten and more steps until it settles (docs/log/freed-memory). Without huge pages up to 1.7 workspaces stay, of which
# `machine.host_memory.HeapGuard` gives back the excess.
_PIECES_OF_ACTIVATIONS, _PIECES_OF_WORKSPACE = 0.66, 1.2
# Operations of a chunk: read, update, two writes. Of a block and micro-batch: forward, backward, and the ways of an input to a
# drive and back. Measured: up to 350 bytes for an operation of a program and 140 for its completion, kept for two steps.
_OPERATIONS_OF_A_CHUNK, _OPERATIONS_OF_A_BLOCK, _OPERATION_BYTES, _COMPLETION_BYTES = 4, 6, 350, 140
# And the ways of hosted hidden states and their gradients, to the device and back, and of what is kept beside an input.
_OPERATIONS_OF_HOSTED = 5
# A micro-batch that waits at its experts is a thread: its stack, and that of the library that multiplies.
_THREAD_BYTES = MIB
# Programs that are kept: the steady state repeats one, and rare batch shapes must not pile up.
MOST_PROGRAMS = 3
# A loss of the whole step makes about eight float32 numbers of each token.
_LOSS_TOKEN_BYTES = 32
# oneDNN keeps at most 1024 pieces of code, three for each product.
_MOST_PRODUCTS = 340
# A checkpoint is written while steps go on if that takes at most this part of host memory. A unit's adapters are in memory so
# often then: as read, in the order of the file, as written.
_MOST_SAVING, _TENSORS_OF_ADAPTERS = 8, 3
# Names of rows of the host tier that are no buffers of a step.
_RUNTIME, _MERGE, _IMPORT = "runtime", "merging between steps", "import and export"


def with_footprint(plan: Plan, costs: ModelCosts, allowance: Allowance) -> Plan:
    """Return `plan` with its peak bytes per tier and purpose filled in."""
    groups, sharers = buffer_groups(plan), allowance.sharers
    rows = peak_rows(groups, allowance.runtime_bytes, separate_device=plan.separate_device, sharers=sharers)
    compute = rows["device" if plan.separate_device else "host"]
    compute["activations"] = compute.get("activations", 0) + _activation_bytes(
        plan, costs, pools=plan.separate_device and allowance.device_overhead_bytes > 0
    )
    making = max((*(unit.making_bytes for unit in plan.units), plan.experts.figures.making_bytes if plan.experts else 0))
    compute["workspace"] = _workspace_bytes(plan, costs) + device_update_temporary_bytes(plan) + making
    if temporary_bytes := host_update_temporary_bytes(plan):
        rows["host"]["updates"] = temporary_bytes
    if allowance.table_bytes:
        rows["host"]["rows of tables"] = allowance.table_bytes
    if plan.embedding is not None and plan.separate_device:
        rows["host"]["rows of the embedding"] = plan.embedding.held_bytes(plan.micro_batch_tokens)
    if plan.results.tables and plan.separate_device:
        rows["host"]["rows of tables in blocks"] = held_table_bytes(plan)
    # Where a GPU multiplies, the host's matrix library stays idle.
    on_cpu = not allowance.device_overhead_bytes
    rows["host"]["libraries"] = _SMALL_BYTES + (_kernel_bytes(costs) if on_cpu else 0)
    rows["host"]["program"] = program_bytes(plan)
    if plan.experts is not None:
        rows["host"]["threads at experts"] = plan.experts.together * _THREAD_BYTES
    if on_cpu:
        rows["host"]["freed blocks"] = _kept_free_bytes(plan, compute)
    if plan.separate_device and allowance.device_overhead_bytes:
        rows["device"]["libraries"] = _library_bytes(plan, compute, allowance.device_overhead_bytes)
    if links := _link_bytes(plan):
        rows["host"]["links"] = links
    if merging := merging_bytes(plan):
        # What compute takes is free between two steps, where it lies in the same memory.
        free = 0 if plan.separate_device else compute["activations"] + compute["workspace"]
        rows["host"][_MERGE] = max(0, merging - free)
    _add_import(rows, plan, allowance)
    if allowance.saves and 0 < (saving := saving_bytes(plan, allowance)) <= allowance.host_bytes // _MOST_SAVING:
        rows["host"][SAVING_ROW] = saving
    rows["ssd"] = _ssd_rows(plan)
    if allowance.table_drive_bytes:
        rows["ssd"]["tables, two places"] = allowance.table_drive_bytes
    return plan.with_results(peak_bytes=rows, allowed_bytes=allowance.of(rows))


def drive_bytes(plan: Plan, unit: int) -> int:
    """Return the bytes of a unit on the drives: two slots for what is written again, one for frozen weights."""
    weights, figures = plan.stored_bytes(unit), plan.units[unit]
    if figures.is_far:
        return 0
    if figures.in_place:
        return 2 * (weights + plan.state_bytes(unit))
    if basis_bytes := plan.basis_bytes(unit):  # the present basis and the next one; weights are merged
        rest = rest_of_master(plan.planes.states)
        weights = 2 * (weights + (rest.num_bytes(figures.num_elements) if rest else 0) + 2 * basis_bytes)
    return weights + 2 * (plan.trained_bytes(unit) + plan.state_bytes(unit))


def with_serving_footprint(plan: Plan, allowance: Allowance) -> Plan:
    """Return `plan`, which computes nothing, with its peak bytes per tier and purpose filled in."""
    rows = peak_rows(buffer_groups(plan), allowance.runtime_bytes, separate_device=False)
    rows["host"]["libraries"] = _SMALL_BYTES
    rows["host"]["program"] = program_bytes(plan)
    if temporary_bytes := host_update_temporary_bytes(plan):
        rows["host"]["updates"] = temporary_bytes
    _add_import(rows, plan, allowance)
    rows["ssd"] = _ssd_rows(plan)
    return plan.with_results(peak_bytes=rows, allowed_bytes=allowance.of(rows))


def _add_import(rows: dict[str, dict[str, int]], plan: Plan, allowance: Allowance) -> None:
    """Add what an import takes. Before the first step and after the last, memory serves that a step's buffers take: only the
    excess counts.
    """
    if allowance.import_workspace_bytes is not None:
        imported = allowance.runtime_bytes + _SMALL_BYTES + import_bytes(plan) + allowance.import_workspace_bytes
        rows["host"][_IMPORT] = max(0, imported - sum(rows["host"].values()))


def _ssd_rows(plan: Plan) -> dict[str, int]:
    durable = sum(drive_bytes(plan, unit) for unit in range(len(plan.units)))
    return {"states, two slots": durable, "scratch": scratch_bytes(plan)}


def import_bytes(plan: Plan) -> int:
    """Return the bytes of the buffers of `import_model` (`flow/weights/load.py`): the largest unit's weights and master, and a
    chunk of its states. Its `UnitReader`, which reads them at the end, takes no more.
    """
    planes = plan.planes
    rest = rest_of_master(planes.states)
    master = rest.bytes_per_element if rest else 0
    largest = max(unit.num_elements for unit in plan.units)
    chunk = plan.largest_state_bytes(min(plan.updates.chunk_elements, largest)) if master else 0
    made_of = max(plan.source_bytes(unit) for unit in range(len(plan.units)))
    settling = max(_settling_bytes(plan, unit) for unit in range(len(plan.units)))
    return largest * (planes.weight.bytes_per_element + master) + chunk + made_of + settling


def saving_bytes(plan: Plan, allowance: Allowance) -> int:
    """Return the bytes of writing a checkpoint while steps go on: those of the export, or of adapters' files. It is 0 where
    that would have to make weights, as compute does, or read rows of tables: then steps wait.
    """
    if allowance.table_bytes:
        return 0
    if beside := [plan.completing_bytes(unit) for unit, figures in enumerate(plan.units) if figures.is_beside]:
        return _TENSORS_OF_ADAPTERS * max(beside) + _SMALL_BYTES
    if any(unit.is_made or unit.is_far for unit in plan.units):
        return 0
    return import_bytes(plan) + (allowance.import_workspace_bytes or 0) + _SMALL_BYTES


def _settling_bytes(plan: Plan, unit: int) -> int:
    """Return the bytes for merging the trained family into a unit, and for moving its states to another basis
    (`flow.step.settle`). The weights, their remainder and what they are made of are not counted.
    """
    figures = plan.units[unit]
    if not figures.basis_elements:
        return 0
    rest, elements = rest_of_master(plan.planes.states), figures.num_elements
    is_split = rest is not None and rest.bytes_per_element < 4  # `merge` joins the master in memory of its own
    master = 4 * elements + 16 * min(elements, MERGED_ELEMENTS) if is_split else 0
    making = max(0, figures.making_bytes - 4 * elements)  # without the gradient that a step sums for new bases
    return master + plan.basis_bytes(unit) + 2 * plan.state_bytes(unit) + making


def merging_bytes(plan: Plan) -> int:
    """Return the most bytes that `flow.step.settle` takes between two steps: all of one unit, besides the buffers of a step."""
    rest = rest_of_master(plan.planes.states)
    stored = plan.planes.weight.bytes_per_element + (rest.bytes_per_element if rest else 0)
    return max(
        (
            stored * figures.num_elements + plan.completing_bytes(unit) + _settling_bytes(plan, unit)
            for unit, figures in enumerate(plan.units)
            if figures.basis_elements
        ),
        default=0,
    )


def with_runtime(plan: Plan, runtime_bytes: int, sharers: int = 1) -> Plan:
    """Return the plan of a run that goes on in another process, whose interpreter takes `runtime_bytes`, and which shares
    weights with so many ranks. Everything else stays, because another placement would be another order of sums, and the model
    is still to be exported.
    """
    host = plan.results.peak_bytes["host"] | {_RUNTIME: runtime_row(plan, runtime_bytes)}
    if not plan.serves:
        groups = buffer_groups(plan)
        counted = peak_rows(groups, runtime_bytes, separate_device=plan.separate_device, sharers=sharers)
        host["weights"] = counted["host"]["weights"]
    return plan.with_results(peak_bytes=plan.results.peak_bytes | {"host": host})


def runtime_row(plan: Plan, runtime_bytes: int) -> int:
    """Return the earlier plan's row if this process differs from it by rounding alone, else what is planned for this process.

    It suffices: `planned_runtime_bytes` adds a whole spread, so this process stays below a row that is smaller by one spread.
    """
    row = plan.results.peak_bytes["host"].get(_RUNTIME, 0)
    return row if abs(runtime_bytes - row) <= RUNTIME_SPREAD else runtime_bytes


def program_bytes(plan: Plan) -> int:
    """Return the bytes for operations of steps: the programs that are kept, and the marks of completion for two steps."""
    chunks = sum(plan.num_chunks(unit) for unit in range(len(plan.units)))
    of_a_block = _OPERATIONS_OF_A_BLOCK + (_OPERATIONS_OF_HOSTED if plan.hosted else 0)
    operations = _OPERATIONS_OF_A_CHUNK * chunks + of_a_block * plan.num_blocks * plan.batch.num_micro_batches
    if plan.experts is not None:  # each round is read, sent, made and computed, forward and backward, for each group
        groups = -(-plan.batch.num_micro_batches // plan.experts.together)
        operations += 2 * _OPERATIONS_OF_A_CHUNK * groups * plan.experts.all_rounds
    return operations * (MOST_PROGRAMS * _OPERATION_BYTES + 2 * _COMPLETION_BYTES)


def _kept_free_bytes(plan: Plan, compute: dict[str, int]) -> int:
    """Return the bytes of freed tensors that the C library keeps (machine/host_memory.py). Where freed memory is given back, it
    keeps those that are too small to be mapped one by one.

    Measured in that case (docs/log/unplanned-memory): up to 12 MiB above 31 MiB of workspace; hardly anything where hidden
    states are mapped. What scans of state-space layers leave besides is given back near the limit (`HeapGuard`).
    """
    if plan.freed_memory == "kept":
        pieces = _PIECES_OF_ACTIVATIONS * compute["activations"] + _PIECES_OF_WORKSPACE * compute["workspace"]
        return _SMALL_BYTES + round(pieces)
    if plan.hidden_bytes >= MAPPED_BYTES:
        return MAPPED_BYTES
    return _SMALL_BYTES + min(compute["workspace"] // 2, KEPT_FREE_BYTES)


def _kernel_bytes(costs: ModelCosts) -> int:
    """Return the bytes that the CPU's matrix library keeps after the first step: code for each shape, forward and two
    gradients.
    """
    if costs.compute_dtype != "bfloat16" or costs.wide_products:
        return 0
    products = {
        (operator.name, operator.flops, operator.output_bytes)
        for block in costs.blocks
        for operator in block.operators
        if operator.name != ATTENTION
    }
    return 3 * (min(len(products), _MOST_PRODUCTS) + 1) * _KERNEL_BYTES  # one more for the head


def _activation_bytes(plan: Plan, costs: ModelCosts, *, pools: bool) -> int:
    """Return the bytes that lie on the device between operations: hidden states or their gradients, and what waits for
    backward.

    `pools`: freed memory only serves the stream on which it was made, as in torch's allocator for GPUs. So what comes back for
    backward and what compute makes never use the same place one after the other.
    """
    count, hidden = plan.micros_together, plan.hidden_bytes
    staying = sum(plan.stash_bytes(block) for block in plan.blocks_stashed_on("device"))
    kept_away = [
        plan.stash.kept_bytes[block - 1] for block in range(1, plan.num_blocks + 1) if plan.stash.tiers[block - 1] != "device"
    ]
    # Forward at block l, micro-batch j: outputs of l up to j, inputs of l, and inputs of l - 1 after j that are not stashed
    # yet. Compute is at most one block ahead of the stash. Kept outputs of the last two blocks count, too.
    forward = (2 * count + 1) * hidden + (count + 1) * max(kept_away, default=0)
    if plan.hosted:
        forward = _hosted_bytes(plan, max(kept_away, default=0))
    # Backward: one gradient each, one more that is being made, and what was recalled for this use and the next ones.
    backward = (plan.coming_slots + plan.hosted.going if plan.hosted else count + 1) * hidden
    group = plan.experts.together if plan.experts else 1  # that backward takes through a block together
    recalled = (RECALLED_AHEAD + 1 + group) * (hidden + max(kept_away, default=0))
    most = max(forward, backward) + recalled if pools else max(forward, backward + recalled)
    # Of a loss of the whole step: log-probabilities and their gradients, and what the loss makes of them.
    of_loss = (plan.batch.head_passes - 1) * plan.batch.tokens_per_step * _LOSS_TOKEN_BYTES
    # A stage embeds all of a step before it takes the first group.
    embedded = plan.batch.num_micro_batches * hidden if plan.stage else 0
    return most + embedded + plan.micros_in_flight * staying + plan.batch.num_micro_batches * costs.call_bytes + of_loss


def _link_bytes(plan: Plan) -> int:
    """Return the bytes of hidden states and gradients on their way between stages. Each way two groups have come and not been
    taken, and one is taken. All in flight may wait to be sent, and as many gradients as the stage before has in flight.
    """
    if plan.stage is None:
        return 0
    ways = 2 - (plan.stage.is_first or plan.stage.is_last)
    return ways * (3 + plan.stage.in_flight + 2) * plan.micros_together * plan.hidden_bytes


def _hosted_bytes(plan: Plan, kept_bytes: int) -> int:
    """Return the bytes in forward where hidden states wait in host memory: what comes, and outputs that go. Beside kept outputs
    a block's input stays until these have left.
    """
    assert plan.hosted is not None, "hidden states wait in host memory"
    going = plan.hidden_bytes + (plan.hidden_bytes + kept_bytes if kept_bytes else 0)
    return plan.coming_slots * plan.hidden_bytes + plan.hosted.going * going


def _library_bytes(plan: Plan, device: dict[str, int], overhead_bytes: int) -> int:
    """Return the bytes that a GPU takes beyond live tensors. Attention's backward makes fp32 sums of three inputs' gradients,
    and the copy lanes have copies in flight. For the allocator a quarter of short-lived bytes is added. It rounds to 2 MiB, and
    takes segments of 20 MiB for tensors below 10 MiB. Tensors of 7 MiB and more leave up to half of such a segment unused.
    """
    in_flight = 2 * max(plan.stash_bytes(block) for block in range(1, plan.num_blocks + 1))
    return overhead_bytes + 6 * plan.hidden_bytes + in_flight + (device["activations"] + device["workspace"]) // 4


def _workspace_bytes(plan: Plan, costs: ModelCosts) -> int:
    has_loss = plan.stage is None or plan.stage.is_last
    head = plan.visiting_bytes if plan.head_slot_bytes is None else _ranged_bytes(plan)
    epilogue = epilogue_workspace_bytes(costs, plan.batch.loss_chunk_tokens) + head if has_loss else 0
    others = min(plan.experts.together, plan.batch.num_micro_batches) - 1 if plan.experts else 0  # that wait at the experts
    blocks = max(
        max(block.forward_workspace_bytes + others * forward, block.backward_workspace_bytes + others * backward)
        for block in costs.blocks
        for forward, backward in (_waiting_bytes(plan, block),)
    )
    of_rows = plan.embedding is not None and not plan.separate_device  # which are read on the host
    rows = plan.embedding.held_bytes(plan.micro_batch_tokens) if of_rows and plan.embedding else 0
    blocks += 0 if plan.separate_device else held_table_bytes(plan)
    return max(epilogue, blocks, costs.prologue_workspace_bytes + rows, costs.prologue_backward_workspace_bytes)


def _ranged_bytes(plan: Plan) -> int:
    """Return what waits while ranges of the head come one after the other. These are the inputs of the head for a micro-batch
    and their gradients, which are float32 until all ranges have come. Each token has some sums, too.
    """
    width = plan.batch.hidden_size_bytes // plan.planes.weight.bytes_per_element
    return 2 * plan.hidden_bytes + plan.micro_batch_tokens * (4 * width + _LOSS_TOKEN_BYTES)


def _waiting_bytes(plan: Plan, block: BlockCosts) -> tuple[int, int]:
    """Return what a micro-batch takes while others are at the experts of a block, in forward and in backward."""
    forward, backward = block.waiting_bytes
    return forward, block.waiting_alone_bytes if plan.experts and plan.experts.remakes else backward


def epilogue_workspace_bytes(costs: ModelCosts, tokens: int) -> int:
    """Return the epilogue's peak bytes for a chunk of `tokens`; a straight line between samples lies above a convex curve."""
    samples = costs.epilogue_workspace_bytes
    if tokens <= samples[0][0]:
        return samples[0][1]
    for (low, low_bytes), (high, high_bytes) in pairwise(samples):
        if tokens <= high:
            return low_bytes + (high_bytes - low_bytes) * (tokens - low) // (high - low)
    return samples[-1][1] * tokens // samples[-1][0]
