"""The trained family and its basis, read from the store to complete frozen weights: for a step, an export and a generation."""

import torch

from headrace.machine.host_memory import Bytes, huge_page_buffer
from headrace.store.committed import ReadableState
from headrace.terms.families import BASIS, TRAINED, Unit
from headrace.terms.layout import part


def completing_bytes(unit: Unit) -> int:
    """Return the bytes that complete a unit's frozen weights: what is trained, and its basis."""
    return sum(family.num_bytes for name in (TRAINED, BASIS) if (family := unit.family(name)) is not None)


def read_completing(store: ReadableState, unit: int, memory: Bytes) -> torch.Tensor:
    """Read what completes a unit's frozen weights into `memory`; return it as float32."""
    start = 0
    for name in (TRAINED, BASIS):
        if (family := store.manifest.units[unit].family(name)) is not None:
            store.read(unit, name, memory[start : start + family.num_bytes]).wait()
            start += family.num_bytes
    return torch.from_numpy(memory[:start]).view(torch.float32)


def read_trained(store: ReadableState, unit: int) -> dict[str, torch.Tensor]:
    """Read the newest weights of a unit's trained family: each parameter's, flat, float32."""
    described = store.manifest.units[unit]
    family = described.family(TRAINED)
    assert family is not None, "the unit has a trained family of its own"
    found = read_completing(store, unit, huge_page_buffer(completing_bytes(described)))
    return {spec.name: part(found, spec) for spec in family.layout.parameters}
