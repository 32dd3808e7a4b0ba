"""A model enters the store and leaves it, unit by unit. It never exists whole in memory."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.flow.weights.completing import completing_bytes, read_completing
from headrace.flow.weights.make import Maker
from headrace.machine.host_memory import Bytes, huge_page_buffer
from headrace.model import WeightMap, import_unit
from headrace.store import StateStore
from headrace.store.committed import ReadableState
from headrace.terms.families import REST, STATES, TRAINED, WEIGHTS, Family, Unit
from headrace.terms.forms import Form
from headrace.terms.layout import Plane, rest_of_master
from headrace.terms.sizes import MERGED_ELEMENTS
from headrace.update.rules.tensors import join, split
from headrace.update.sites.site import Site


def import_model(weights: WeightMap, store: StateStore, maker: Maker, record: Mapping[str, Any], site: Site | None) -> None:
    """Read each unit's tensors from the checkpoint into the store and commit `record`.

    The first state plane (the remainder of the split master, or the fp32 master) is written only if it is not all zero. The
    rule's own states are zero, which the store knows without writing. Frozen weights are written as their form has them, unless
    they are lent, and beside them the first weights of the trained family.
    """
    units, plane = store.manifest.units, maker.weight
    # One buffer for each plane, as large as the largest unit, serves all units: freed memory goes back to the system late.
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
        if not form.is_lent:
            write_family(store, index, WEIGHTS, stored)
        if (trained := unit.family(TRAINED)) is not None:
            first = huge_page_buffer(trained.num_bytes)
            maker.begin(index, _float32_of(dense, master), first)
            write_family(store, index, TRAINED, first)
        if unit.family(REST) is not None and master is not None and not complete:
            write_family(store, index, REST, master_memory[: _master_bytes(unit)])
        states = unit.family(STATES) if trained is None else None
        if states is not None and master is not None and not complete:
            for chunk, (start, stop) in enumerate(states.chunks):
                store.write(index, STATES, chunk, _states_with_master(states, chunk, master[start:stop])).wait()
    if site is not None:
        site.commit(0)
    store.commit(record)


def write_family(store: StateStore, unit: int, name: str, content: Bytes) -> None:
    """Write a family whose chunks lie back to back in `content`, which begins on a page."""
    family = store.manifest.units[unit].family(name)
    assert family is not None, "what is written has a place"
    start = 0
    for chunk in range(family.num_chunks):
        stop = start + family.chunk_bytes(chunk)
        store.write(unit, family.name, chunk, content[start:stop]).wait()
        start = stop


def _master_plane(unit: Unit) -> Plane | None:
    """Return the plane that completes the weights to their master. Beside a trained family of its own, a unit has one if its
    weights are merged with what is trained.
    """
    if (rest := unit.family(REST)) is not None:
        return rest.planes[0]
    states = unit.family(STATES) if unit.family(TRAINED) is None else None
    return rest_of_master(states.planes) if states else None


def _master_bytes(unit: Unit) -> int:
    plane = _master_plane(unit)
    return plane.num_bytes(unit.weights.layout.num_elements) if plane else 0


def _float32_of(dense: torch.Tensor, rest: NDArray[Any] | None) -> torch.Tensor:
    """Return the weights in float32: their master, where `rest` completes it."""
    if dense.dtype == torch.float32:
        return dense
    if rest is None:
        return dense.float()
    return torch.from_numpy(rest) if rest.dtype == np.float32 else join(dense, torch.from_numpy(rest))


def _states_with_master(states: Family, chunk: int, master: NDArray[Any]) -> Bytes:
    """Return a chunk's states: the plane of the master, then zeros."""
    whole = huge_page_buffer(states.chunk_bytes(chunk))
    whole[: master.nbytes] = master.view(np.uint8)
    return whole


class UnitReader:
    """Gives a unit's newest weights to the exporter: as compute reads them. The plane that completes their master comes with
    those units whose files need it (`exact`), if there is one. The next unit overwrites the arrays. It takes as much
    memory as `import_model`.
    """

    def __init__(self, store: ReadableState, maker: Maker, site: Site | None, exact: Collection[int]) -> None:
        self._store, self._maker, self._site, self._exact = store, maker, site, exact
        units = store.manifest.units
        self._weights = huge_page_buffer(max(maker.weight.num_bytes(form.layout.num_elements) for form in maker.forms))
        self._stored = huge_page_buffer(max(unit.weights.num_bytes if form.code else 0 for unit, form in self._pairs()))
        self._trained = huge_page_buffer(max(map(completing_bytes, units)))
        self._master = huge_page_buffer(max(_master_bytes(unit) for unit in units))
        self._chunk = huge_page_buffer(max(_largest_chunk_bytes(unit) for unit in units))

    def _pairs(self) -> Iterator[tuple[Unit, Form]]:
        return zip(self._store.manifest.units, self._maker.forms, strict=True)

    def __call__(self, unit: int) -> tuple[NDArray[Any], NDArray[Any] | None] | None:
        """Return `(weights, rest)`. `rest` is `lo`, the fp32 master, or None if the weights are the master. Return None for a
        unit that stays exactly as it came.
        """
        described, form, plane = self._store.manifest.units[unit], self._maker.forms[unit], self._maker.weight
        if form.trained is None and form.code is None:
            return None
        weights = self._weights[: plane.num_bytes(form.layout.num_elements)]
        bits = weights.view(plane.dtype)
        if form.is_far and self._site is not None:
            self._site.pull(unit, weights)
            return bits, None
        if not form.in_place and (form.basis is None or plane.dtype == "float32"):
            self._make(unit, described, form, weights)
            return bits, None
        self._store.read(unit, WEIGHTS, weights).wait()
        states, rest = described.family(STATES), _master_plane(described)
        if form.basis is not None and rest is not None:
            self._store.read(unit, REST, self._master[: _master_bytes(described)]).wait()
            master = self._master[: _master_bytes(described)].view(rest.dtype)
            trained = read_completing(self._store, unit, self._trained)
            merge(self._maker, unit, torch.from_numpy(weights).view(self._maker.dtype), torch.from_numpy(master), trained)
            return bits, master
        if states is None or rest is None or unit not in self._exact:
            return bits, None
        master = self._master[: _master_bytes(described)].view(rest.dtype)
        for chunk, (start, stop) in enumerate(states.chunks):
            content = self._chunk[: states.chunk_bytes(chunk)]
            self._store.read(unit, STATES, content, chunk).wait()
            master[start:stop] = content[: (stop - start) * rest.bytes_per_element].view(rest.dtype)
        return bits, master

    def _make(self, unit: int, described: Unit, form: Form, weights: Bytes) -> None:
        """Fill `weights` with the weights that compute would read."""
        into = torch.from_numpy(weights).view(self._maker.dtype)
        stored = self._stored[: described.weights.num_bytes] if form.code else weights
        self._store.read(unit, WEIGHTS, stored).wait()
        trained = read_completing(self._store, unit, self._trained) if described.family(TRAINED) is not None else None
        self._maker.make(unit, torch.from_numpy(stored) if form.code else None, trained, into)


def merge(maker: Maker, unit: int, weights: torch.Tensor, rest: torch.Tensor | None, trained: torch.Tensor) -> None:
    """Merge `weights` (compute dtype), and the `rest` of their fp32 master, with what is `trained`, in place.

    It allocates a master of bfloat16 weights, 4 bytes for each, and what `Maker.complete` does; all else is done in pieces.
    """
    if rest is None:
        maker.complete(unit, weights, trained)
        return
    is_split = weights.dtype == torch.bfloat16
    master = torch.empty(weights.numel(), device=weights.device, dtype=torch.float32) if is_split else rest
    pieces = [slice(start, start + MERGED_ELEMENTS) for start in range(0, weights.numel(), MERGED_ELEMENTS)]
    for piece in pieces if is_split else ():
        master[piece] = join(weights[piece], rest[piece])
    maker.complete(unit, master, trained)
    for piece in pieces:
        if is_split:
            high, low = split(master[piece])
            weights[piece].copy_(high.view(weights.dtype))
            rest[piece].copy_(low)
        else:
            weights[piece].copy_(master[piece])


def _largest_chunk_bytes(unit: Unit) -> int:
    """Return the bytes of the largest chunk of states from which the unit's master is read; 0 where it has none."""
    states = unit.family(STATES)
    if states is None or _master_plane(unit) is None or unit.family(TRAINED) is not None:
        return 0
    return max(states.chunk_bytes(chunk) for chunk, _ in enumerate(states.chunks))
