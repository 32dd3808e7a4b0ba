"""A model into the store and out again, unit by unit: at no time does it exist whole in memory."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.machine.host_memory import Bytes, huge_page_buffer
from headrace.model import Chain, WeightMap, import_unit
from headrace.store import StateStore
from headrace.terms.families import STATES, WEIGHTS, Family, Unit
from headrace.terms.layout import Plane, rest_of_master


def import_model(weights: WeightMap, chain: Chain, store: StateStore, record: Mapping[str, Any]) -> None:
    """Read each unit's tensors from the checkpoint into the store and commit `record`.

    The first state plane (the remainder of the split master, or the fp32 master) is written where it is not all zero; the
    rule's own states are zero, and the store knows zero without writing it.
    """
    units = store.manifest.units
    # One buffer for each plane of the largest unit, used again and again: what the heap gives back is not the system's at once.
    weight_memory = huge_page_buffer(max(unit.weights.num_bytes for unit in units))
    master_memory = huge_page_buffer(max(map(_master_bytes, units), default=0))
    for index, (unit, layout) in enumerate(zip(units, chain.layouts, strict=True)):
        weight, states, plane = weight_memory[: unit.weights.num_bytes], unit.family(STATES), _master_plane(unit)
        master = master_memory[: _master_bytes(unit)].view(plane.dtype) if plane else None
        complete = import_unit(weights, layout, weight.view(unit.weights.planes[0].dtype), master)
        width = unit.weights.planes[0].bytes_per_element
        for chunk, (start, stop) in enumerate(unit.weights.chunks):
            store.write(index, WEIGHTS, chunk, weight[start * width : stop * width]).wait()
        if states is not None and master is not None and not complete:
            for chunk, (start, stop) in enumerate(states.chunks):
                store.write(index, STATES, chunk, _states_with_master(states, chunk, master[start:stop])).wait()
    store.commit(record)


def _master_plane(unit: Unit) -> Plane | None:
    states = unit.family(STATES)
    return rest_of_master(states.planes) if states else None


def _master_bytes(unit: Unit) -> int:
    plane = _master_plane(unit)
    return plane.num_bytes(unit.weights.layout.num_elements) if plane else 0


def _states_with_master(states: Family, chunk: int, master: NDArray[Any]) -> Bytes:
    """Return a chunk's states: the master's plane, then zeros."""
    whole = huge_page_buffer(states.chunk_bytes(chunk))
    whole[: master.nbytes] = master.view(np.uint8)
    return whole


class UnitReader:
    """Gives a unit's newest weights, and its first state plane where the master is split, to the exporter. What it gave is
    overwritten by the next unit: it takes as much memory as `import_model`.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        units = store.manifest.units
        self._weights = huge_page_buffer(max(unit.weights.num_bytes for unit in units))
        self._master = huge_page_buffer(max(_master_bytes(unit) for unit in units))
        self._chunk = huge_page_buffer(max(_largest_chunk_bytes(unit) for unit in units))

    def __call__(self, unit: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Return `(weights, lo or fp32 master, or None where the weights are the master)`."""
        described = self._store.manifest.units[unit]
        weights = self._weights[: described.weights.num_bytes]
        self._store.read(unit, WEIGHTS, weights).wait()
        states, plane = described.family(STATES), _master_plane(described)
        bits = weights.view(described.weights.planes[0].dtype)
        if states is None or plane is None:
            return bits, None
        master = self._master[: _master_bytes(described)].view(plane.dtype)
        for chunk, (start, stop) in enumerate(states.chunks):
            content = self._chunk[: states.chunk_bytes(chunk)]
            self._store.read(unit, STATES, content, chunk).wait()
            master[start:stop] = content[: (stop - start) * plane.bytes_per_element].view(plane.dtype)
        return bits, master


def _largest_chunk_bytes(unit: Unit) -> int:
    """Return the bytes of a chunk of the states that the unit's master is read from; 0 where it has none."""
    states = unit.family(STATES)
    if states is None or _master_plane(unit) is None:
        return 0
    return max(states.chunk_bytes(chunk) for chunk, _ in enumerate(states.chunks))
