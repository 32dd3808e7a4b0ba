"""The trained numbers of a run in fp32, wherever they lie: a unit's are one vector, its parameters by name and without padding.

Two runs of one model have the same vectors, whatever their rules, compute dtypes and layouts are. Between two steps they can be
read and replaced; moments of the rule stay. A subspace is merged with its weights first, and begins anew.

Memory: some 10 bytes for each number of the largest unit, as for an import.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from headrace.flow.weights.completing import completing_bytes, read_completing
from headrace.flow.weights.load import write_family
from headrace.flow.weights.make import Maker
from headrace.machine.host_memory import Bytes, huge_page_buffer
from headrace.store import StateStore
from headrace.terms.families import REST, STATES, TRAINED, WEIGHTS
from headrace.terms.forms import Form
from headrace.terms.layout import FROZEN, ParameterSpec, Plane, part, rest_of_master
from headrace.update.rules.tensors import join, split
from headrace.update.wires.wire import Wire


class Masters:
    """The trained numbers in `store`, whose units have the forms of `maker`. No step may be under way."""

    def __init__(self, store: StateStore, maker: Maker, wire: Wire) -> None:
        self._store, self._maker, self._wire = store, maker, wire
        self._specs = tuple(map(trained_specs, maker.forms))

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of each unit: 0 where nothing is trained."""
        return tuple(sum(spec.num_elements for spec in specs) for specs in self._specs)

    @cached_property
    def digest(self) -> str:
        """A digest of the names and shapes: equal where vectors mean the same."""
        names = [[(spec.name, tuple(spec.shape)) for spec in specs] for specs in self._specs]
        return hashlib.blake2b(repr(names).encode(), digest_size=16).hexdigest()

    @torch.no_grad()
    def read(self, unit: int) -> torch.Tensor:
        """Return the vector of a unit, float32."""
        return self._gathered(unit, self._flat(unit)) if self._specs[unit] else torch.empty(0, dtype=torch.float32)

    @torch.no_grad()
    def write(self, unit: int, values: torch.Tensor) -> None:
        """Replace the vector of a unit; the next commit makes it durable."""
        specs, form = self._specs[unit], self._maker.forms[unit]
        if not specs:
            return
        flat = self._flat(unit)
        self.scatter(unit, values, flat)
        if form.in_place:
            self._write_weights(unit, flat, STATES)
        elif form.basis is None:
            self._write(unit, TRAINED, flat.view(torch.uint8).numpy())
        else:
            self._write_weights(unit, flat, REST)
            assert form.trained is not None, "a subspace is trained"
            memory = huge_page_buffer(completing_bytes(self._store.manifest.units[unit]))
            whole = read_completing(self._store, unit, memory)
            self._wire.restart(unit, form.layout, form.trained, whole)
            for spec, own in self._wire.as_they_are(unit, form.layout, form.trained):
                part(whole, own).copy_(part(flat, spec))
            self._write(unit, TRAINED, memory[: 4 * form.trained.num_elements])

    def scatter(self, unit: int, values: torch.Tensor, flat: torch.Tensor) -> None:
        """Put a vector into the places that its parameters have in `flat`, laid out as what is trained of the unit."""
        start = 0
        for spec in self._specs[unit]:
            part(flat, spec).copy_(values[start : start + spec.num_elements])
            start += spec.num_elements

    def _gathered(self, unit: int, flat: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(flat, spec) for spec in self._specs[unit]])

    def _flat(self, unit: int) -> torch.Tensor:
        """Return what is trained of a unit in its own layout, float32."""
        form, described = self._maker.forms[unit], self._store.manifest.units[unit]
        if not form.in_place and form.basis is None:
            return torch.from_numpy(self._read(unit, TRAINED)).view(torch.float32)
        weights = torch.from_numpy(self._read(unit, WEIGHTS)).view(self._maker.dtype)
        rest = self._rest(unit, REST if form.basis is not None else STATES)
        master = weights.float() if rest is None else join(weights, rest) if rest.dtype == torch.int16 else rest
        if form.basis is not None:
            memory = huge_page_buffer(completing_bytes(described))
            self._maker.complete(unit, master, read_completing(self._store, unit, memory))
        return master

    def _rest(self, unit: int, name: str) -> torch.Tensor | None:
        """Return what completes the weights of a unit to their master; None where they are it."""
        family = self._store.manifest.units[unit].family(name)
        plane = rest_of_master(family.planes) if family is not None else None
        if family is None or plane is None:
            return None
        rest = np.empty(family.layout.num_elements, plane.dtype)
        for chunk, (start, stop) in enumerate(family.chunks):
            content = huge_page_buffer(family.chunk_bytes(chunk))
            self._store.read(unit, name, content, chunk).wait()
            rest[start:stop] = _first_plane(content, plane, stop - start).view(plane.dtype)
        return torch.from_numpy(rest)

    def _write_weights(self, unit: int, master: torch.Tensor, name: str) -> None:
        """Write weights as compute reads them, and what completes them to their `master` into the family of that name."""
        family, dtype = self._store.manifest.units[unit].family(name), self._maker.dtype
        plane = rest_of_master(family.planes) if family is not None else None
        weights, rest = master.to(dtype), master
        if dtype == torch.bfloat16 and plane is not None:
            high, rest = split(master)
            weights = high.view(dtype)
        self._write(unit, WEIGHTS, weights.view(torch.uint8).numpy())
        if family is None or plane is None:
            return
        for chunk, (start, stop) in enumerate(family.chunks):
            content = huge_page_buffer(family.chunk_bytes(chunk))
            self._store.read(unit, name, content, chunk).wait()
            _first_plane(content, plane, stop - start)[:] = rest[start:stop].view(torch.uint8).numpy()
            self._store.write(unit, name, chunk, content).wait()

    def _read(self, unit: int, name: str) -> Bytes:
        family = self._store.manifest.units[unit].family(name)
        assert family is not None, "the unit has this family"
        memory = huge_page_buffer(family.num_bytes)
        self._store.read(unit, name, memory).wait()
        return memory

    def _write(self, unit: int, name: str, content: Bytes) -> None:
        aligned = huge_page_buffer(content.size)
        aligned[:] = content
        write_family(self._store, unit, name, aligned)


def trained_specs(form: Form) -> Sequence[ParameterSpec]:
    """Return the parameters of a unit that training may change, by name: its own, or those of its trained family. Of a
    subspace, these are the weights that are merged with it.
    """
    if form.trained is None:
        return ()
    layout = form.layout if form.in_place or form.basis is not None else form.trained
    kept = (spec for spec in layout.parameters if spec.name not in form.left and spec.kind != FROZEN)
    return tuple(sorted(kept, key=lambda spec: spec.name))


def _first_plane(content: Bytes, plane: Plane, num_elements: int) -> Bytes:
    return content[: plane.num_bytes(num_elements)]
