"""A model into the store and out again, unit by unit: at no time does it exist whole in memory."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.flow.make import Maker
from headrace.machine.host_memory import Bytes, huge_page_buffer
from headrace.model import WeightMap, import_unit
from headrace.store import StateStore
from headrace.terms.families import STATES, TRAINED, WEIGHTS, Family, Unit
from headrace.terms.forms import Form
from headrace.terms.layout import Plane, rest_of_master
from headrace.update.site import Site


def import_model(weights: WeightMap, store: StateStore, maker: Maker, record: Mapping[str, Any], site: Site | None) -> None:
    """Read each unit's tensors from the checkpoint into the store and commit `record`.

    The first state plane (the remainder of the split master, or the fp32 master) is written where it is not all zero; the
    rule's own states are zero, and the store knows zero without writing it. Frozen weights are written as their form has them,
    and beside them the trained family's first ones.
    """
    units, plane = store.manifest.units, maker.weight
    # One buffer for each plane of the largest unit, used again and again: what the heap gives back is not the system's at once.
    weight_memory = huge_page_buffer(max(plane.num_bytes(form.layout.num_elements) for form in maker.forms))
    master_memory = huge_page_buffer(max(map(_master_bytes, units), default=0))
    for index, (unit, form) in enumerate(zip(units, maker.forms, strict=True)):
        weight, rest = weight_memory[: plane.num_bytes(form.layout.num_elements)], _master_plane(unit)
        master = master_memory[: _master_bytes(unit)].view(rest.dtype) if rest else None
        complete = import_unit(weights, form.layout, weight.view(plane.dtype), master)
        if form.is_far:
            assert site is not None, "far units have a site"
            site.begin(index, weight)
            continue
        dense = torch.from_numpy(weight).view(maker.dtype)
        stored = huge_page_buffer(unit.weights.num_bytes) if form.code else weight
        if form.code:
            maker.encode(index, dense, stored)
        _write(store, index, unit.weights, stored)
        if (trained := unit.family(TRAINED)) is not None:
            first = huge_page_buffer(trained.num_bytes)
            maker.begin(index, dense, first)
            _write(store, index, trained, first)
        states = unit.family(STATES)
        if states is not None and master is not None and not complete:
            for chunk, (start, stop) in enumerate(states.chunks):
                store.write(index, STATES, chunk, _states_with_master(states, chunk, master[start:stop])).wait()
    if site is not None:
        site.commit(0)
    store.commit(record)


def _write(store: StateStore, unit: int, family: Family, content: Bytes) -> None:
    """Write a family whose chunks lie back to back in `content`."""
    start = 0
    for chunk in range(family.num_chunks):
        stop = start + family.chunk_bytes(chunk)
        store.write(unit, family.name, chunk, content[start:stop]).wait()
        start = stop


def _master_plane(unit: Unit) -> Plane | None:
    """Return the plane that completes the weights to their master: a trained family of its own needs none."""
    states = unit.family(STATES) if unit.family(TRAINED) is None else None
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
    """Gives a unit's newest weights to the exporter: as compute reads them, and with the plane that completes their master
    where they have one. What it gave is overwritten by the next unit: it takes as much memory as `import_model`.
    """

    def __init__(self, store: StateStore, maker: Maker, site: Site | None) -> None:
        self._store, self._maker, self._site = store, maker, site
        units = store.manifest.units
        self._weights = huge_page_buffer(max(maker.weight.num_bytes(form.layout.num_elements) for form in maker.forms))
        self._stored = huge_page_buffer(max(unit.weights.num_bytes if form.code else 0 for unit, form in self._pairs()))
        trained = [family.num_bytes for unit in units if (family := unit.family(TRAINED)) is not None]
        self._trained = huge_page_buffer(max(trained, default=0))
        self._master = huge_page_buffer(max(_master_bytes(unit) for unit in units))
        self._chunk = huge_page_buffer(max(_largest_chunk_bytes(unit) for unit in units))

    def _pairs(self) -> Iterator[tuple[Unit, Form]]:
        return zip(self._store.manifest.units, self._maker.forms, strict=True)

    def __call__(self, unit: int) -> tuple[NDArray[Any], NDArray[Any] | None] | None:
        """Return `(weights, lo or fp32 master, or None where the weights are the master)`; None for a unit that stays exactly
        as it came.
        """
        described, form, plane = self._store.manifest.units[unit], self._maker.forms[unit], self._maker.weight
        if form.trained is None and form.code is None:
            return None
        weights = self._weights[: plane.num_bytes(form.layout.num_elements)]
        bits = weights.view(plane.dtype)
        if form.is_far and self._site is not None:
            self._site.pull(unit, weights)
            return bits, None
        if not form.in_place:
            self._make(unit, described, form, weights)
            return bits, None
        self._store.read(unit, WEIGHTS, weights).wait()
        states, rest = described.family(STATES), _master_plane(described)
        if states is None or rest is None:
            return bits, None
        master = self._master[: _master_bytes(described)].view(rest.dtype)
        for chunk, (start, stop) in enumerate(states.chunks):
            content = self._chunk[: states.chunk_bytes(chunk)]
            self._store.read(unit, STATES, content, chunk).wait()
            master[start:stop] = content[: (stop - start) * rest.bytes_per_element].view(rest.dtype)
        return bits, master

    def _make(self, unit: int, described: Unit, form: Form, weights: Bytes) -> None:
        """Fill `weights` with those that compute would read."""
        into = torch.from_numpy(weights).view(self._maker.dtype)
        stored = self._stored[: described.weights.num_bytes] if form.code else weights
        self._store.read(unit, WEIGHTS, stored).wait()
        trained = None
        if (family := described.family(TRAINED)) is not None:
            content = self._trained[: family.num_bytes]
            self._store.read(unit, TRAINED, content).wait()
            trained = torch.from_numpy(content).view(torch.float32)[: family.layout.num_elements]
        self._maker.make(unit, torch.from_numpy(stored) if form.code else None, trained, into)


def _largest_chunk_bytes(unit: Unit) -> int:
    """Return the bytes of a chunk of the states that the unit's master is read from; 0 where it has none."""
    states = unit.family(STATES)
    if states is None or _master_plane(unit) is None:
        return 0
    return max(states.chunk_bytes(chunk) for chunk, _ in enumerate(states.chunks))
