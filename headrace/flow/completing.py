"""The trained family and its basis, read from the store to complete frozen weights: for a step, an export and a generation."""

from collections.abc import Mapping

import torch

from headrace.machine.host_memory import Bytes, huge_page_buffer
from headrace.model.adapters import Adapters
from headrace.store import StateStore
from headrace.terms.families import BASIS, TRAINED, Unit
from headrace.terms.layout import UnitLayout, part


class AdapterReader:
    """Gives the newest tensors of a unit's adapters, flat in the layout of `adapters`; the store has them as `trained` says."""

    def __init__(self, store: StateStore, trained: Mapping[int, UnitLayout], adapters: Adapters) -> None:
        self._store, self._trained, self._adapters = store, trained, adapters
        units = [store.manifest.units[unit] for unit in trained]
        self._memory = huge_page_buffer(max(map(completing_bytes, units)))

    def __call__(self, unit: int) -> torch.Tensor:
        """Return the tensors of a unit, float32."""
        layout = self._adapters.layouts[unit]
        own = {spec.name: spec for spec in self._trained[unit].parameters}
        found, flat = read_completing(self._store, unit, self._memory), torch.zeros(layout.num_elements)
        for spec in layout.parameters:
            part(flat, spec).copy_(part(found, own[spec.name]))
        return flat


def completing_bytes(unit: Unit) -> int:
    """Return the bytes that complete a unit's frozen weights: what is trained, and its basis."""
    return sum(family.num_bytes for name in (TRAINED, BASIS) if (family := unit.family(name)) is not None)


def read_completing(store: StateStore, unit: int, memory: Bytes) -> torch.Tensor:
    """Read what completes a unit's frozen weights into `memory`; return it as float32."""
    start = 0
    for name in (TRAINED, BASIS):
        if (family := store.manifest.units[unit].family(name)) is not None:
            store.read(unit, name, memory[start : start + family.num_bytes]).wait()
            start += family.num_bytes
    return torch.from_numpy(memory[:start]).view(torch.float32)
