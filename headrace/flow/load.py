"""A model into the store and out again, unit by unit: at no time does it exist whole in memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.machine.host import Bytes, huge_page_buffer
from headrace.model import Chain, WeightMap, import_unit
from headrace.store import StateStore
from headrace.terms.layout import Plane, PlaneSet, UnitLayout, chunk_ranges


def import_model(weights: WeightMap, chain: Chain, store: StateStore, record: Mapping[str, Any]) -> None:
    """Read each unit's tensors from the checkpoint into the store and commit `record`.

    The first state plane (the remainder of the split master, or the fp32 master) is written where it is not all zero; the
    moments are zero, and the store knows zero without writing it.
    """
    planes, chunk_elements = store.manifest.planes, store.manifest.chunk_elements
    largest = max(layout.num_elements for layout in chain.layouts)
    weight_memory = huge_page_buffer(largest * planes.weight.bytes_per_element)
    plane = _master_plane(planes)
    master_memory = huge_page_buffer(largest * plane.bytes_per_element) if plane else None
    width = planes.weight.bytes_per_element
    for unit, layout in enumerate(chain.layouts):
        weight = weight_memory[: layout.num_elements * width]
        master = None
        if plane is not None and master_memory is not None:
            master = master_memory[: layout.num_elements * plane.bytes_per_element].view(plane.dtype)
        complete = import_unit(weights, layout, weight.view(planes.weight.dtype), master)
        for chunk, (start, stop) in enumerate(chunk_ranges(layout.num_elements, chunk_elements)):
            store.write_weights(unit, chunk, weight[start * width : stop * width]).wait()
            if master is not None and not complete:
                store.write_states(unit, chunk, _states_with_master(planes, master[start:stop])).wait()
    store.commit(record)


def _master_plane(planes: PlaneSet) -> Plane | None:
    """Return the state plane that completes the weights to the fp32 master: none where the weights are the master."""
    return planes.states[0] if planes.states[0].name in ("lo", "w") else None


def _states_with_master(planes: PlaneSet, master: NDArray[Any]) -> Bytes:
    """Return a chunk's states: the master's plane, then zero moments."""
    states = huge_page_buffer(planes.state_bytes(master.size))
    states[: master.nbytes] = master.view(np.uint8)
    return states


class UnitReader:
    """Gives a unit's newest weights, and its first state plane where the master is split, to the exporter."""

    def __init__(self, store: StateStore, layouts: Sequence[UnitLayout]) -> None:
        self._store, self._layouts = store, layouts

    def __call__(self, unit: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Return `(weights, lo or fp32 master, or None where the weights are the master)`."""
        planes, layout = self._store.manifest.planes, self._layouts[unit]
        weights = huge_page_buffer(layout.num_elements * planes.weight.bytes_per_element)
        self._store.read_weights(unit, weights).wait()
        plane = _master_plane(planes)
        if plane is None:
            return weights.view(planes.weight.dtype), None
        master = np.empty(layout.num_elements, plane.dtype)
        for chunk, (start, stop) in enumerate(chunk_ranges(layout.num_elements, self._store.manifest.chunk_elements)):
            states = huge_page_buffer(planes.state_bytes(stop - start))
            self._store.read_states(unit, chunk, states).wait()
            master[start:stop] = states[: (stop - start) * plane.bytes_per_element].view(plane.dtype)
        return weights.view(planes.weight.dtype), master
