"""The contract of rules of whole rows or matrices as tests: subclass `TensorRuleContract` in a test module, name the optimizer.

    class TestMatrixScaled(TensorRuleContract):
        optimizer = MatrixScaled()

Invariant: a rule that passes trains the same bits wherever its planes lie, however a unit is cut, in any number of threads. It
takes no more memory than it declares. Its own tests check what it computes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.terms.cuts import (
    HOST_ITEM_ELEMENTS,
    Cuts,
    chunk_borders,
    cuts_of,
    largest_item_elements,
    least_chunk_elements,
    num_values,
    piece_values,
    pieces_of,
)
from headrace.terms.layout import COMPUTE_DTYPES, ItemRange, Plane, UnitLayout, lay_out
from headrace.terms.options.optimizer import Optimizer
from headrace.testing.rule_contract import Planes, StorageMeter, TrafficMeter, gradient_of, on_tensors
from headrace.update import DeviceUpdater, StepScalars, Updater, rule_of
from headrace.update.rules.rule import Chunk
from headrace.update.rules.tensor_rule import TensorRule, items_rule
from headrace.update.rules.tensors import as_tensor

STEP = StepScalars(learning_rate=1e-2, update=3, gradient_scale=0.5)
# A matrix that is longer than what the host updates at once, one with an odd shape, a stack, a vector, and an embedding.
PARAMETERS: list[tuple[str, tuple[int, ...], tuple[float, float]]] = [
    ("long", (300, 200), (1.0, 0.1)),
    ("odd", (37, 101), (0.5, 0.1)),
    ("stack", (3, 40, 48), (1.0, 0.1)),
    ("norm", (77,), (1.0, 0.0)),
    ("embed", (64, 50), (1.0, 0.1)),
]


class TensorRuleContract:
    """What every rule of rows or matrices must satisfy, by compute type."""

    optimizer: ClassVar[Optimizer]
    compute_dtypes: ClassVar[tuple[str, ...]] = COMPUTE_DTYPES

    def state(self, plane: Plane, num_elements: int, seed: int) -> NDArray[Any]:
        """Return numbers that `plane` may hold in the middle of a run; by default they have both signs."""
        drawn = np.random.default_rng(seed).standard_normal(num_elements, np.float32)
        return (drawn * (1 if plane.dtype == "float32" else 100)).astype(plane.dtype)

    def planes(self, rule: TensorRule, layout: UnitLayout) -> Planes:
        """Return weights and states of `rule` in the middle of a run; padding is zero."""
        weight, cuts = np.zeros(layout.num_elements, rule.planes.weight.dtype), cuts_of(layout, rule.figures)
        sizes = [num_values(plane, 0, layout.num_elements, cuts) for plane in rule.planes.states]
        states = tuple(np.zeros(size, plane.dtype) for size, plane in zip(sizes, rule.planes.states, strict=True))
        for number, parameter in enumerate(layout.parameters):
            place, count = slice(parameter.offset, parameter.offset + parameter.num_elements), parameter.num_elements
            drawn = np.random.default_rng(number).standard_normal(count, np.float32)
            bits = (drawn.view(np.uint32) >> 16).astype(np.uint16)
            weight[place] = bits if weight.dtype.name == "uint16" else drawn
            for index, (state, plane) in enumerate(zip(states, rule.planes.states, strict=True)):
                own = state_part(plane, cuts, place)
                state[own] = self.state(plane, count, 10 * number + index)[: own.stop - own.start]
        return weight, states

    def rules(self) -> Iterator[tuple[TensorRule, UnitLayout, str]]:
        """Yield the rule for each compute type, a layout that suits it, and a name for messages."""
        for compute_dtype in self.compute_dtypes:
            rule = items_rule(rule_of(self.optimizer, compute_dtype))
            layout = lay_out("block.1", PARAMETERS, rule.figures.parameter_alignment)
            yield rule, layout, f"{rule.figures.name}, {compute_dtype}"

    def test_no_cut_no_thread_and_no_site_changes_a_bit(self) -> None:
        """The smallest chunks in reverse order, three threads, small pieces on a device; padding stays zero."""
        for rule, layout, name in self.rules():
            pieces, cuts = pieces_of(layout, rule.figures), cuts_of(layout, rule.figures)
            whole, gradient = self.planes(rule, layout), gradient_of(layout.num_elements, "uint16")
            gradient[_padding(layout)] = 0
            host, device, begun = copied(whole), on_tensors(whole), copied(whole)
            with Updater(rule, 1) as updater:
                updater.update_range(Chunk(*whole, gradient), STEP, pieces)
            assert not np.array_equal(whole[0], begun[0]), name
            assert not whole[0][_padding(layout)].any(), f"{name}: padding has moved"
            borders = chunk_borders(layout.num_elements, least_chunk_elements(cuts), cuts)
            assert len(borders) > 2, name
            with Updater(rule, 3) as updater:
                for start, stop in reversed(list(pairwise(borders))):
                    part = slice(start, stop)
                    places = [state_part(plane, cuts, part) for plane in rule.planes.states]
                    states = tuple(state[place] for state, place in zip(host[1], places, strict=True))
                    updater.update_range(
                        Chunk(host[0][part], states, gradient[part], 0, start), STEP, pieces, take_checksums=True
                    )
                    there = tuple(state[place] for state, place in zip(device[1], places, strict=True))
                    small = DeviceUpdater(rule, piece_elements=999)
                    small.update_range(
                        Chunk(device[0][part], there, as_tensor(gradient, bfloat16=True)[part], 0, start), STEP, pieces
                    )
            check_same_bits(whole, host, name)
            check_same_bits(whole, device, f"{name}, on a device")

    def test_an_item_is_updated_as_if_it_were_alone(self) -> None:
        """Whatever others there are in the piece, among them one whose gradient is not finite."""
        for rule, layout, name in self.rules():
            cuts = cuts_of(layout, rule.figures)
            items = [piece for piece in pieces_of(layout, rule.figures) if isinstance(piece, ItemRange)]
            assert items, name
            for piece in items:
                part = slice(piece.start, piece.stop)
                weight, states = self.planes(rule, layout)
                gradient = gradient_of(layout.num_elements, "float32")
                places = [state_part(plane, cuts, part) for plane in rule.planes.states]
                own = tuple(state[place].copy() for state, place in zip(states, places, strict=True))
                together = weight[part].copy(), own
                alone = copied(together)
                tensors = tuple(as_tensor(array) for array in (together[0], *together[1]))
                broken = torch.from_numpy(gradient[part].copy())
                if len(broken) > piece.item_elements:
                    broken[-1] = torch.inf
                rule.apply_to_items(tensors[0], tensors[1:], broken, STEP, piece)
                first = slice(0, piece.item_elements)
                item = replace(piece, stop=piece.start + piece.item_elements)
                of_one = [first, *(slice(0, piece_values(plane, item)) for plane in rule.planes.states)]
                one = [as_tensor(array)[place] for array, place in zip((alone[0], *alone[1]), of_one, strict=True)]
                rule.apply_to_items(one[0], tuple(one[1:]), torch.from_numpy(gradient[part].copy())[first], STEP, piece)
                for left, right, place in zip((together[0], *together[1]), (alone[0], *alone[1]), of_one, strict=True):
                    assert np.array_equal(left[place], right[place]), name

    def test_what_it_takes_is_declared(self) -> None:
        """Temporaries on both sites, for gradients of any type; on a device what is read and written."""
        for rule, layout, name in self.rules():
            figures, pieces = rule.figures, pieces_of(layout, rule.figures)
            largest = largest_item_elements(cuts_of(layout, figures))
            for dtype in ("uint16", "float32"):
                planes, gradient = self.planes(rule, layout), gradient_of(layout.num_elements, dtype)
                weight, states = on_tensors(planes)
                arriving = as_tensor(gradient, bfloat16=True)
                with StorageMeter([weight, *states, arriving]) as storage, TrafficMeter() as traffic:  # type: ignore[no-untyped-call]
                    device = DeviceUpdater(rule, piece_elements=1024)
                    device.update_range(Chunk(weight, states, arriving), STEP, pieces)
                found = storage.peak_bytes / max(1024, largest)
                assert found <= figures.temporary_bytes, f"{name}, {dtype}: {found} bytes per element"
                if figures.device_traffic_bytes is not None:
                    ratio = traffic.num_bytes / layout.num_elements / figures.device_traffic_bytes
                    assert 0.9 < ratio < 1.1, f"{name}, {dtype}: {ratio} of the traffic that is declared"
                arrays = copied(planes)
                with Updater(rule, 1) as updater, StorageMeter([]) as storage:
                    updater.update_range(Chunk(*arrays, gradient), STEP, pieces)
                # Tensors over the arrays are counted, too, but they are no temporaries.
                over = sum(array.nbytes for array in (arrays[0], *arrays[1], gradient))
                assert storage.peak_bytes - over <= max(HOST_ITEM_ELEMENTS, largest) * figures.temporary_bytes, name


def state_part(plane: Plane, cuts: Sequence[Cuts], part: slice) -> slice:
    """Return the place in a plane of the numbers of elements `part` of a unit."""
    return slice(num_values(plane, 0, part.start, cuts), num_values(plane, 0, part.stop, cuts))


def copied(planes: Planes) -> Planes:
    """Return a copy of all planes."""
    return planes[0].copy(), tuple(state.copy() for state in planes[1])


def check_same_bits(expected: Planes, found: Any, what: str) -> None:
    """Raise AssertionError unless arrays, or tensors on any device, have the bits of `expected`."""
    for want, got in zip((expected[0], *expected[1]), (found[0], *found[1]), strict=True):
        array = got.cpu().view(torch.uint8).numpy() if isinstance(got, torch.Tensor) else got.view(np.uint8)
        assert np.array_equal(want.view(np.uint8), array), what


def _padding(layout: UnitLayout) -> NDArray[np.bool_]:
    padding = np.ones(layout.num_elements, bool)
    for each in layout.parameters:
        padding[each.offset : each.offset + each.num_elements] = False
    return padding
