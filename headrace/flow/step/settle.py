"""Between two steps: the trained subspace is merged into the weights, and its states move to a new basis.

A step leaves a unit's new basis beside the old one, in its own commit. The work here follows from that commit alone, and ends
with its own commit. If it is interrupted, it is done again from the same bytes.

Invariant: a model has the same weights before and after it, apart from the rounding of one sum.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from headrace.flow.step.step_state import Verdict
from headrace.flow.weights.completing import completing_bytes, read_completing
from headrace.flow.weights.load import merge, write_family
from headrace.flow.weights.make import Maker
from headrace.machine.host_memory import Bytes, huge_page_buffer
from headrace.store import StateStore
from headrace.terms.families import BASIS, NEXT_BASIS, REST, STATES, TRAINED, WEIGHTS, Family
from headrace.update.wires.wire import Proposal, Wire

# The key in a commit's record with the units whose basis is to be replaced.
PROPOSED = "proposed"


def changed(proposal: Proposal) -> bool:
    """Return whether a proposal has a new basis, and not only figures of the present one."""
    return proposal.basis.numel() > 0


def proposed_in(verdict: Verdict) -> dict[str, Any]:
    """Return what a step's commit says about the bases that it leaves; {} where no unit has one."""
    units = [unit for unit, each in sorted(verdict.proposals.items()) if each.replaces and changed(each)]
    return {PROPOSED: units} if verdict.proposals else {}


@torch.no_grad()
def settle(store: StateStore, maker: Maker, wire: Wire, record: Mapping[str, Any]) -> None:
    """Merge and move as the newest commit asks, and commit `record` without that key. No step may be under way."""
    proposed = frozenset(record.get(PROPOSED, ()))
    merged = [unit for unit, form in enumerate(maker.forms) if form.basis is not None and wire.merges_each_step]
    for unit in sorted({*merged, *proposed}):
        _settle_unit(store, maker, wire, unit, moves=unit in proposed)
    store.commit({**record, PROPOSED: []})


def _settle_unit(store: StateStore, maker: Maker, wire: Wire, unit: int, *, moves: bool) -> None:
    form, described = maker.forms[unit], store.manifest.units[unit]
    assert form.trained is not None, "a subspace is trained"
    layouts = form.layout, form.trained
    memory = huge_page_buffer(completing_bytes(described))
    whole, trained_elements = read_completing(store, unit, memory), form.trained.num_elements
    weights, rest = _read(store, unit, WEIGHTS), _read(store, unit, REST)
    dense = torch.from_numpy(_of(weights)).view(maker.dtype)[: form.layout.num_elements]
    completing = None if rest is None else torch.from_numpy(rest).view(_REST_DTYPES[maker.dtype])[: form.layout.num_elements]
    merge(maker, unit, dense, completing, whole)
    write_family(store, unit, WEIGHTS, _of(weights))
    if rest is not None:
        write_family(store, unit, REST, rest)
    del weights, rest, dense, completing
    wire.restart(unit, *layouts, whole)
    write_family(store, unit, TRAINED, memory[: 4 * trained_elements])
    if moves:
        other = _of(_read(store, unit, NEXT_BASIS))
        if described.family(STATES) is not None:
            old, new = whole[trained_elements:], torch.from_numpy(other).view(torch.float32)
            _move_states(store, wire, unit, layouts, (old, new))
        write_family(store, unit, BASIS, other)


_REST_DTYPES = {torch.bfloat16: torch.int16, torch.float16: torch.float32}


def _move_states(
    store: StateStore, wire: Wire, unit: int, layouts: tuple[Any, Any], bases: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Move a unit's states from one basis to another. Chunks have their planes back to back, so each plane is put together
    first.
    """
    family = store.manifest.units[unit].family(STATES)
    assert family is not None, "there are states"
    content = _of(_read(store, unit, STATES))
    planes = {plane.name: torch.empty(layouts[1].num_elements, dtype=torch.float32) for plane in family.planes}
    for name, part, (start, stop) in _plane_parts(family, content):
        planes[name][start:stop] = part
    wire.move(unit, *layouts, bases, planes)
    for name, part, (start, stop) in _plane_parts(family, content):
        part.copy_(planes[name][start:stop])
    write_family(store, unit, STATES, content)


def _plane_parts(family: Family, content: Bytes) -> Iterable[tuple[str, torch.Tensor, tuple[int, int]]]:
    """Yield each plane of each chunk as a view of `content`, and the elements to which it belongs."""
    begin = 0
    for chunk, (start, stop) in enumerate(family.chunks):
        at = begin
        for plane in family.planes:
            end = at + plane.num_bytes(stop - start)
            yield plane.name, torch.from_numpy(content[at:end]).view(torch.float32), (start, stop)
            at = end
        begin += family.chunk_bytes(chunk)


def _read(store: StateStore, unit: int, name: str) -> Bytes | None:
    family = store.manifest.units[unit].family(name)
    if family is None:
        return None
    memory = huge_page_buffer(family.num_bytes)
    store.read(unit, name, memory).wait()
    return memory


def _of(memory: Bytes | None) -> Bytes:
    assert memory is not None, "a unit has this family"
    return memory
