"""The contract of an update rule as tests: subclass `RuleContract` in a test module, name the optimizer and a reference.

    class TestSGD(RuleContract):
        optimizer = SGD(momentum=0.9)

        def reference(self, parameter):
            return torch.optim.SGD([parameter], lr=LEARNING_RATE, momentum=0.9, weight_decay=WEIGHT_DECAY)

Invariant: a rule that passes trains the same bits wherever its planes lie, however a unit is cut, and in any number of threads.
The same holds on the host or on a device, resumed or unbroken. All values are drawn from fixed seeds.
"""

import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.store import checksum_reference
from headrace.terms.errors import ConfigError
from headrace.terms.layout import COMPUTE_DTYPES, UNIT_ALIGNMENT, GroupRange, Plane
from headrace.terms.options.optimizer import Optimizer
from headrace.update import (
    DeviceUpdater,
    StepScalars,
    Updater,
    UpdateRule,
    rule_of,
)
from headrace.update.rules.rule import Chunk
from headrace.update.rules.tensors import as_tensor, join, split

LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.1
STEP = StepScalars(learning_rate=LEARNING_RATE, update=3, gradient_scale=0.5)
# Several shares for each thread, and a remainder. Groups meet inside of a loop's pieces, but never inside of a block of
# elements.
NUM_ELEMENTS = 133 * UNIT_ALIGNMENT
GROUPS = (GroupRange(0, 768, 1.0, 0.0), GroupRange(768, 100_096, 1.0, 0.1), GroupRange(100_096, NUM_ELEMENTS, 0.5, 0.01))
_UPDATES = 60

Planes = tuple[NDArray[Any], tuple[NDArray[Any], ...]]


class RuleContract:
    """What every rule must satisfy, by compute type and type of gradient."""

    optimizer: ClassVar[Optimizer]
    # A loop is compiled for each compute type and type of gradient, which takes most of the time.
    compute_dtypes: ClassVar[tuple[str, ...]] = COMPUTE_DTYPES
    # Allowed difference of the weights from the reference after `_UPDATES` updates: a step rounds a weight near 4 by at most
    # 2^-23.
    tolerance: ClassVar[float] = 3e-6

    def reference(self, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        """Return the same rule over `parameter`, with `LEARNING_RATE` and `WEIGHT_DECAY`, as others have written it."""
        raise NotImplementedError

    def state(self, plane: Plane, num_elements: int, seed: int) -> NDArray[Any]:
        """Return numbers that `plane` may hold in the middle of a run; by default they are not negative."""
        rng, count = np.random.default_rng(seed), plane.num_values(num_elements)
        drawn: NDArray[Any] = (
            (rng.standard_normal(count) * 1e-3) ** 2 if plane.dtype == "float32" else rng.integers(0, 100, count)
        )
        return drawn.astype(plane.dtype)

    def planes(self, rule: UpdateRule, num_elements: int) -> Planes:
        """Return weights and states of `rule` in the middle of a run."""
        master = np.random.default_rng(1).standard_normal(num_elements, np.float32) * np.float32(0.02)
        weight, rest = _split(master, rule.planes.compute_dtype)
        own = rule.planes.states[len(rest) :]
        return weight, (*rest, *(self.state(plane, num_elements, 2 + index) for index, plane in enumerate(own)))

    def _rules(self) -> Iterator[UpdateRule]:
        for compute_dtype in self.compute_dtypes:
            yield rule_of(self.optimizer, compute_dtype)

    def test_the_form_on_tensors_has_the_bits_of_the_compiled_loops(self) -> None:
        """In pieces of an odd length too, for ordinary numbers and for gradients of any bits."""
        for rule in self._rules():
            for dtype in gradient_dtypes(rule):
                for any_bits in (False, True):
                    planes, gradient = self.planes(rule, 10_240), gradient_of(10_240, dtype, any_bits=any_bits)
                    weight, states = on_tensors(planes)
                    groups = (GroupRange(0, 4352, 1.0, 0.0), GroupRange(4352, 10_240, 0.5, 0.1))
                    device = DeviceUpdater(rule, piece_elements=999)
                    device.update_range(Chunk(weight, states, as_tensor(gradient, bfloat16=True), 5), STEP, groups)
                    with Updater(rule, 1) as updater:
                        updater.update_range(Chunk(*planes, gradient, 5), STEP, groups)
                    check_same(planes, (as_array(weight), tuple(map(as_array, states))), f"{rule.figures.name}, {dtype}")

    def test_neither_cuts_nor_threads_change_a_bit(self) -> None:
        """Chunks in any order."""
        gradient = gradient_of(NUM_ELEMENTS, "uint16")
        for rule in self._rules():
            expected = self.planes(rule, NUM_ELEMENTS)
            for group in GROUPS:
                part = _part(rule, expected, group.start, group.stop)
                scalars = (group.weight_decay, group.learning_rate_scale)
                rule.apply(Chunk(*part, gradient[group.start : group.stop], 4, group.start), STEP, *scalars)
            for threads, chunk_elements in ((1, UNIT_ALIGNMENT), (3, NUM_ELEMENTS), (2, 37 * UNIT_ALIGNMENT)):
                planes = self.planes(rule, NUM_ELEMENTS)
                with Updater(rule, threads) as updater:
                    for start in reversed(range(0, NUM_ELEMENTS, chunk_elements)):
                        stop = min(start + chunk_elements, NUM_ELEMENTS)
                        part = _part(rule, planes, start, stop)
                        updater.update_range(Chunk(*part, gradient[start:stop], 4, start), STEP, GROUPS)
                check_same(planes, expected, f"{rule.figures.name}, {threads} threads, chunks of {chunk_elements}")

    def test_checksums_on_the_way_are_those_of_what_is_left_and_change_no_bit(self) -> None:
        """A rule that takes none says so."""
        gradient = gradient_of(NUM_ELEMENTS, "uint16")
        for rule in self._rules():
            planes, expected = self.planes(rule, NUM_ELEMENTS), self.planes(rule, NUM_ELEMENTS)
            with Updater(rule, 2) as updater:
                found = updater.update_range(Chunk(*planes, gradient), STEP, GROUPS, take_checksums=True)
                updater.update_range(Chunk(*expected, gradient), STEP, GROUPS)
            check_same(planes, expected, rule.figures.name)
            content = np.zeros(rule.planes.state_bytes(NUM_ELEMENTS), np.uint8)
            for (_, place), state in zip(rule.planes.split_states(NUM_ELEMENTS), planes[1], strict=True):
                content[place] = state.view(np.uint8)
            sums = (checksum_reference(planes[0]), checksum_reference(content))
            assert found == (sums if rule.sums else None), rule.figures.name

    def test_it_follows_its_reference(self) -> None:
        """Update by update from states of zero, which the store knows without writing them."""
        rule = rule_of(self.optimizer, "float32")
        master = np.random.default_rng(0).standard_normal(2048, np.float32)
        weight, states = master.copy(), _zeros(rule, 2048)
        parameter = torch.nn.Parameter(torch.from_numpy(master.copy()))
        reference = self.reference(parameter)
        for update in range(1, _UPDATES + 1):
            gradient = gradient_of(2048, "float32", seed=update)
            parameter.grad = torch.from_numpy(gradient.copy())
            reference.step()
            step = StepScalars(learning_rate=LEARNING_RATE, update=update)
            rule.apply(Chunk(weight, states, gradient), step, WEIGHT_DECAY, 1.0)
        np.testing.assert_allclose(weight, parameter.detach().numpy(), rtol=0, atol=self.tolerance)
        assert np.abs(weight - master).max() > 1e-3, "nothing moved"

    def test_every_master_goes_through_the_same_numbers(self) -> None:
        """The fp32 master of 16-bit weights is that of fp32 weights, update after update."""
        masters = []
        for rule in self._rules():
            weight, rest = _split(np.random.default_rng(1).standard_normal(2048, np.float32), rule.planes.compute_dtype)
            states = (*rest, *_zeros(rule, 2048)[len(rest) :])
            for update in range(1, 20):
                step = StepScalars(learning_rate=LEARNING_RATE, update=update)
                rule.apply(Chunk(weight, states, gradient_of(2048, "float32", seed=update)), step, WEIGHT_DECAY, 1.0)
            masters.append(_joined(weight, states, rule.planes.compute_dtype))
        assert all(np.array_equal(masters[0], other) for other in masters[1:])

    def test_what_goes_on_from_a_count_of_updates_goes_on_with_the_same_bits(self) -> None:
        """All that a resumed run has are planes, its options, and each unit's count."""
        for rule in self._rules():
            runs = []
            for resumed in (False, True):
                planes = self.planes(rule, UNIT_ALIGNMENT)
                for update in range(1, 8):
                    if resumed and update == 4:
                        planes = planes[0].copy(), tuple(state.copy() for state in planes[1])
                        rule = rule_of(self.optimizer, rule.planes.compute_dtype)
                    gradient = gradient_of(UNIT_ALIGNMENT, "uint16", seed=update)
                    step = StepScalars(learning_rate=LEARNING_RATE, update=update)
                    rule.apply(Chunk(*planes, gradient, 2), step, WEIGHT_DECAY, 1.0)
                runs.append(planes)
            check_same(runs[0], runs[1], rule.figures.name)

    def test_what_it_costs_is_declared(self) -> None:
        """Planes, operations, and on a device temporaries and traffic."""
        for rule in self._rules():
            figures, name = rule.figures, f"{rule.figures.name}, {rule.planes.compute_dtype}"
            assert figures.planes == rule.planes
            assert figures.flops(10) > 0, name
            assert 0 < figures.core_rate <= 1.5, name
            planes = self.planes(rule, 4096)
            arrays = sum(array.nbytes for array in planes[1])
            assert rule.planes.state_bytes(4096) >= arrays, name
            assert figures.traffic_bytes(4096, 2) >= 2 * (arrays + planes[0].nbytes) + 8192, name
            for dtype in gradient_dtypes(rule):
                weight, states = on_tensors(planes)
                gradient = as_tensor(gradient_of(4096, dtype), bfloat16=True)
                updater = DeviceUpdater(rule, piece_elements=1024)
                with StorageMeter([weight, *states, gradient]) as storage:
                    updater.update_range(Chunk(weight, states, gradient), STEP, (GroupRange(0, 4096, 1.0, 0.1),))
                assert storage.peak_bytes <= updater.temporary_bytes, f"{name}: {storage.peak_bytes / 1024} per element"
                assert storage.live_bytes == 0
            if figures.device_traffic_bytes is not None:
                with TrafficMeter() as traffic:  # type: ignore[no-untyped-call]
                    rule.apply_to_tensors(
                        Chunk(weight, states, as_tensor(gradient_of(4096, "float16"), bfloat16=True)), STEP, 0.1, 1.0
                    )
                assert traffic.num_bytes == 4096 * figures.device_traffic_bytes, f"{name}: {traffic.num_bytes / 4096}"

    def test_arrays_that_do_not_fit_are_refused_untouched(self) -> None:
        """Too short, of another type, with gaps; of an element that a block would be cut at."""
        for rule in self._rules():
            planes, gradient = self.planes(rule, 512), gradient_of(512, "uint16")
            before = planes[0].copy(), tuple(state.copy() for state in planes[1])
            weight, states = planes
            _refused(rule, weight[:256], states, gradient)
            _refused(rule, weight, states, gradient[1:])
            _refused(rule, weight, (*states, weight), gradient)
            _refused(rule, weight, states, gradient.astype(np.float64))
            _refused(rule, weight, states, gradient_of(1024, "uint16")[::2])
            if rule.planes.block_elements > 1:
                _refused(rule, weight, states, gradient, first_element=1)
            check_same(planes, before, rule.figures.name)


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that operations create, as long as each lives."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known  # kept: the address of a storage that died would be another's
        self.seen = {tensor.untyped_storage()._cdata for tensor in known}
        self.live_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Perform `operation` and look at what it made."""
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage()._cdata not in self.seen:
            storage = result.untyped_storage()
            self.seen.add(storage._cdata)
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return result

    def _freed(self, key: int, num_bytes: int) -> None:
        self.seen.discard(key)
        self.live_bytes -= num_bytes


class TrafficMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that operations read and write; views move nothing."""

    num_bytes = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Perform `operation` and add what it moved."""
        result = operation(*args, **(kwargs or {}))
        if not operation.is_view:
            tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)]
            self.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result


def gradient_dtypes(rule: UpdateRule) -> tuple[str, ...]:
    """Return the NumPy types that a run's gradients may have: the compute type's, or float32."""
    own = {"bfloat16": "uint16"}.get(rule.planes.compute_dtype, rule.planes.compute_dtype)
    return tuple(dict.fromkeys((own, "float32")))


def gradient_of(num_elements: int, dtype: str, *, seed: int = 0, any_bits: bool = False) -> NDArray[Any]:
    """Return a gradient of a NumPy type: normal numbers, or any bit pattern; uint16 stands for bfloat16 bits."""
    rng = np.random.default_rng(seed)
    if any_bits:
        bits: NDArray[Any] = rng.integers(0, 256, num_elements * np.dtype(dtype).itemsize, np.uint8).view(dtype)
        return bits
    values = rng.standard_normal(num_elements, np.float32)
    return as_array(torch.from_numpy(values).to(torch.bfloat16)) if dtype == "uint16" else values.astype(dtype)


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as an array; bfloat16 becomes its bits."""
    array: NDArray[Any] = tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    return array


def on_tensors(planes: Planes) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return copies of planes as tensors."""
    weight, states = planes
    return as_tensor(weight.copy(), bfloat16=True), tuple(torch.from_numpy(state.copy()) for state in states)


def check_same(left: Planes, right: Planes, what: str) -> None:
    """Raise AssertionError unless all planes have the same bits; only payloads of NaNs outside of split masters may differ."""
    for one, other in zip((left[0], *left[1]), (right[0], *right[1]), strict=True):
        pair = [np.where(np.isnan(a), np.nan, a).astype(a.dtype) if a.dtype.kind == "f" else a for a in (one, other)]
        assert np.array_equal(pair[0].view(np.uint8), pair[1].view(np.uint8)), what


def _split(master: NDArray[np.float32], compute_dtype: str) -> Planes:
    """Return the weights and the rest of the master."""
    if compute_dtype == "bfloat16":
        hi, lo = split(torch.from_numpy(master))
        return hi.numpy().view(np.uint16), (lo.numpy(),)
    return (master.copy(), ()) if compute_dtype == "float32" else (master.astype(np.float16), (master.copy(),))


def _joined(weight: NDArray[Any], states: tuple[NDArray[Any], ...], compute_dtype: str) -> NDArray[Any]:
    if compute_dtype == "bfloat16":
        return as_array(join(as_tensor(weight, bfloat16=True), torch.from_numpy(states[0])))
    return weight if compute_dtype == "float32" else states[0]


def _zeros(rule: UpdateRule, num_elements: int) -> tuple[NDArray[Any], ...]:
    return tuple(np.zeros(plane.num_values(num_elements), plane.dtype) for plane in rule.planes.states)


def _part(rule: UpdateRule, planes: Planes, start: int, stop: int) -> Planes:
    weight, states = planes
    parts = (state[plane.part(start, stop)] for plane, state in zip(rule.planes.states, states, strict=True))
    return weight[start:stop], tuple(parts)


def _refused(rule: UpdateRule, weight: Any, states: Any, gradient: Any, first_element: int = 0) -> None:
    try:
        rule.apply(Chunk(weight, states, gradient, 0, first_element), STEP, 0.1, 1.0)
    except ConfigError:
        return
    raise AssertionError(f"{rule.figures.name}: what does not fit was not refused")
