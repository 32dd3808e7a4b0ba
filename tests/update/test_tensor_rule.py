"""Rules of whole rows and matrices: the same bits however a unit is cut, in any threads, on host and device; bounded memory."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from headrace.terms.cuts import (
    HOST_ITEM_ELEMENTS,
    chunk_borders,
    cuts_of,
    largest_item_elements,
    least_chunk_elements,
    pieces_of,
)
from headrace.terms.errors import ConfigError
from headrace.terms.layout import COMPUTE_DTYPES, UNIT_ALIGNMENT, ItemRange, UnitLayout, lay_out
from headrace.terms.rule_figures import Grain
from headrace.testing.item_rules import MatrixScaled, RowScaled, ScaledRule
from headrace.testing.rule_contract import StorageMeter, TrafficMeter, as_tensor, check_same, gradient_of, on_tensors
from headrace.update import DeviceUpdater, StepScalars, Updater
from headrace.update.rules.sgd import SGD, sgd_rule
from headrace.update.tensor_rule import TensorRule, tree_sum

OPTIMIZERS = [RowScaled(), MatrixScaled()]
STEP = StepScalars(learning_rate=1e-2, update=3, gradient_scale=0.5)
# A matrix that is longer than what the host works on at once, one of an odd shape, a stack, a vector, and what is elementwise.
PARAMETERS: list[tuple[str, tuple[int, ...], tuple[float, float]]] = [
    ("long", (300, 200), (1.0, 0.1)),
    ("odd", (37, 101), (0.5, 0.1)),
    ("stack", (3, 40, 48), (1.0, 0.1)),
    ("norm", (77,), (1.0, 0.0)),
    ("embed", (64, 50), (1.0, 0.1)),
]


def rules() -> list[tuple[ScaledRule, UnitLayout]]:
    found = [ScaledRule(optimizer, dtype) for optimizer in OPTIMIZERS for dtype in COMPUTE_DTYPES]
    return [(rule, lay_out("block.1", PARAMETERS, rule.figures.parameter_alignment)) for rule in found]


def planes_for(rule: ScaledRule, layout: UnitLayout) -> Any:
    """Return planes in the middle of a run, zero where padding is; and a gradient."""
    weight = np.zeros(layout.num_elements, rule.planes.weight.dtype)
    states = tuple(np.zeros(layout.num_elements, plane.dtype) for plane in rule.planes.states)
    gradient = np.zeros(layout.num_elements, np.float32)
    rng = np.random.default_rng(1)
    for parameter in layout.parameters:
        place = slice(parameter.offset, parameter.offset + parameter.num_elements)
        for array in (weight, *states, gradient):
            values = rng.standard_normal(parameter.num_elements, np.float32)
            array[place] = as_bits(values) if array.dtype.name == "uint16" else values
    return (weight, states), gradient


def as_bits(values: Any) -> Any:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def copied(planes: Any) -> Any:
    return planes[0].copy(), tuple(state.copy() for state in planes[1])


def test_no_cut_no_thread_and_no_site_changes_a_bit() -> None:
    for rule, layout in rules():
        name, pieces = f"{rule.figures.name}, {rule.planes.compute_dtype}", pieces_of(layout, rule.figures)
        whole, gradient = planes_for(rule, layout)
        begun = copied(whole)
        with Updater(rule, 1) as updater:
            updater.update_range(*whole, gradient, STEP, pieces, 0, layout.num_elements)
        assert not np.array_equal(whole[0].view(np.uint8), begun[0].view(np.uint8))
        cuts = cuts_of(layout, rule.figures)
        borders = chunk_borders(layout.num_elements, least_chunk_elements(cuts), cuts)
        assert len(borders) > 2, name
        host, device = copied(begun), on_tensors(begun)
        with Updater(rule, 3) as updater:
            for start, stop in reversed(list(pairwise(borders))):
                part = slice(start, stop)
                states = tuple(state[part] for state in host[1])
                assert (
                    updater.update_range(host[0][part], states, gradient[part], STEP, pieces, start, stop, take_checksums=True)
                    is None
                )
                states = tuple(state[part] for state in device[1])
                DeviceUpdater(rule, piece_elements=999).update_range(
                    device[0][part], states, torch.from_numpy(gradient)[part], STEP, pieces, start, stop
                )
        check_same(host, whole, name)
        for tensor, array in zip((device[0].view(torch.uint8), *device[1]), (whole[0], *whole[1]), strict=True):
            assert np.array_equal(tensor.view(torch.uint8).numpy(), array.view(np.uint8)), name


@pytest.mark.gpu
def test_a_gpu_has_the_bits_of_the_host() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for rule, layout in rules():
        pieces, (planes, gradient) = pieces_of(layout, rule.figures), planes_for(rule, layout)
        weight, states = on_tensors(planes)
        there = weight.cuda(), tuple(state.cuda() for state in states), torch.from_numpy(gradient).cuda()
        DeviceUpdater(rule).update_range(*there, STEP, pieces, 0, layout.num_elements)
        with Updater(rule, 2) as updater:
            updater.update_range(*planes, gradient, STEP, pieces, 0, layout.num_elements)
        for tensor, array in zip((there[0], *there[1]), (planes[0], *planes[1]), strict=True):
            assert np.array_equal(tensor.cpu().view(torch.uint8).numpy(), array.view(np.uint8)), rule.figures.name


def test_it_is_what_the_formula_says() -> None:
    """In float64, item by item, from the shapes of the parameters alone."""
    for optimizer in OPTIMIZERS:
        rule = ScaledRule(optimizer, "float32")
        layout = lay_out("block.1", PARAMETERS, rule.figures.parameter_alignment)
        (weight, (buffer,)), gradient = planes_for(rule, layout)
        p, m, g = (array.astype(np.float64) for array in (weight, buffer, gradient * 0.5))
        with Updater(rule, 2) as updater:
            updater.update_range(weight, (buffer,), gradient, STEP, pieces_of(layout, rule.figures), 0, layout.num_elements)
        known = {name: (shape, scalars) for name, shape, scalars in PARAMETERS}
        padding = np.ones(layout.num_elements, bool)
        for each in layout.parameters:
            name, (shape, (scale, decay)) = each.name, known[each.name]
            place = slice(each.offset, each.offset + each.num_elements)
            theirs = g[place].reshape(shape)
            if name in ("long", "odd", "stack"):
                squares = (theirs**2).sum((-2, -1), keepdims=True) if rule.figures.grain is Grain.MATRIX else None
                theirs = theirs / np.sqrt((theirs**2).mean(-1, keepdims=True) if squares is None else squares)
            expected = 0.9 * m[place] + theirs.reshape(-1) + decay * p[place]
            np.testing.assert_allclose(buffer[place], expected, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(weight[place], p[place] - 1e-2 * scale * expected, rtol=1e-5, atol=1e-6)
            padding[place] = False
        assert padding.any()
        assert not weight[padding].any(), "padding has moved"


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_temporaries_are_within_what_is_declared_on_both_sites(dtype: str) -> None:
    for rule, layout in rules():
        planes, _ = planes_for(rule, layout)
        gradient = gradient_of(layout.num_elements, dtype)
        largest, pieces = largest_item_elements(cuts_of(layout, rule.figures)), pieces_of(layout, rule.figures)
        weight, states = on_tensors(planes)
        with StorageMeter([weight, *states, as_tensor(gradient)]) as storage, TrafficMeter() as traffic:  # type: ignore[no-untyped-call]
            DeviceUpdater(rule, piece_elements=1024).update_range(
                weight, states, as_tensor(gradient), STEP, pieces, 0, layout.num_elements
            )
        name = f"{rule.figures.name}, {rule.planes.compute_dtype}, {dtype}"
        assert storage.peak_bytes <= max(1024, largest) * rule.figures.temporary_bytes, (
            f"{name}: {storage.peak_bytes / max(1024, largest)} per element"
        )
        assert rule.figures.device_traffic_bytes is not None
        assert traffic.num_bytes == pytest.approx(layout.num_elements * rule.figures.device_traffic_bytes, rel=0.06), (
            f"{name}: {traffic.num_bytes / layout.num_elements}"
        )
        arrays = copied(planes)
        with Updater(rule, 1) as updater, StorageMeter([]) as storage:
            updater.update_range(*arrays, gradient, STEP, pieces, 0, layout.num_elements)
        # Tensors over the arrays are seen, too: they are no temporaries.
        over = sum(array.nbytes for array in (arrays[0], *arrays[1], gradient))
        assert storage.peak_bytes - over <= max(HOST_ITEM_ELEMENTS, largest) * rule.figures.temporary_bytes, name


def test_sums_are_in_one_order_and_exact_where_they_can_be() -> None:
    values = torch.arange(2 * 3 * 7, dtype=torch.float32).view(2, 3, 7)
    assert torch.equal(tree_sum(values), values.sum((1, 2), keepdim=True))
    for size in (1, 2, 255, 256, 1000):
        drawn = torch.randn(4, 1, size, generator=torch.Generator().manual_seed(size))
        one_by_one = torch.cat([tree_sum(drawn[index : index + 1]) for index in range(4)])
        assert torch.equal(tree_sum(drawn), one_by_one)


def test_what_does_not_go_together_is_refused() -> None:
    rule = ScaledRule(MatrixScaled(), "float32")
    items = ItemRange(0, UNIT_ALIGNMENT, 1.0, 0.0, 32, 64)
    weight, state = torch.zeros(1000), torch.zeros(1000)
    with pytest.raises(ConfigError, match="1000 elements are no whole items of 32 x 64"):
        rule.apply_to_items(weight, (state,), weight.clone(), STEP, items)
    arrays = np.zeros(UNIT_ALIGNMENT, np.float32), (np.zeros(UNIT_ALIGNMENT, np.float32),)
    with Updater(sgd_rule(SGD(), "float32"), 1) as updater, pytest.raises(ConfigError, match="updates elements alone"):
        updater.update_range(*arrays, arrays[0].copy(), STEP, [items], 0, UNIT_ALIGNMENT)
    assert not isinstance(sgd_rule(SGD(), "float32"), TensorRule)
    for figures, alone in (
        (replace(rule.figures, grain=Grain.ELEMENT), sgd_rule(SGD(), "float32")),
        (rule.figures, sgd_rule(SGD(momentum=0.0), "float32")),
    ):
        with pytest.raises(ConfigError, match="has the planes of the rule of elements alone"):
            TensorRule.__init__(rule, figures, alone)
