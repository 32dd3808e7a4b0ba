"""The rule on tensors: the bits of the compiled loops, in bounded memory."""

import pytest
import torch
from update_planes import COMPUTE_DTYPES, STEP, adamw, as_array, as_tensor, gradient_of, ordinary, same_planes, wild

from headrace.terms.errors import ConfigError
from headrace.terms.layout import GroupRange
from headrace.testing.rule_contract import StorageMeter, TrafficMeter
from headrace.update import GRADIENT_DTYPES, DeviceUpdater, Updater
from headrace.update.rules.rule import Chunk

NUM_ELEMENTS = 10_000
GROUPS = (GroupRange(0, 4128, 1.0, 0.0), GroupRange(4128, NUM_ELEMENTS, 0.5, 0.1))


def on_device(planes, device="cpu"):
    return as_tensor(planes[0], bfloat16=True).to(device), tuple(as_tensor(state).to(device) for state in planes[1])


def check_equals_cpu(compute_dtype, gradient_dtype, make, device):
    planes, gradient = make(NUM_ELEMENTS, 0, compute_dtype), gradient_of(NUM_ELEMENTS, 0, gradient_dtype, any_bits=make is wild)
    weight, states = on_device(planes, device)
    tensor = as_tensor(gradient, bfloat16=True).to(device)
    DeviceUpdater(adamw(compute_dtype), piece_elements=999).update_range(Chunk(weight, states, tensor), STEP, GROUPS)
    with Updater(adamw(compute_dtype), 2) as updater:
        updater.update_range(Chunk(*planes, gradient), STEP, GROUPS)
    assert same_planes(planes, (as_array(weight.cpu()), tuple(as_array(state.cpu()) for state in states)))


@pytest.mark.parametrize("make", [ordinary, wild])
@pytest.mark.parametrize("gradient_dtype", GRADIENT_DTYPES)
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_bits_of_the_compiled_loops(compute_dtype, gradient_dtype, make):
    check_equals_cpu(compute_dtype, gradient_dtype, make, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("make", [ordinary, wild])
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_bits_of_the_compiled_loops_on_a_gpu(compute_dtype, make):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    check_equals_cpu(compute_dtype, "uint16", make, "cuda")


@pytest.mark.parametrize("bits_dtype", [torch.int16, torch.uint16])
def test_weights_as_bits(bits_dtype):
    first, second = on_device(ordinary(4096, 1, "bfloat16")), on_device(ordinary(4096, 1, "bfloat16"))
    gradient = as_tensor(gradient_of(4096, 1, "uint16"), bfloat16=True)
    groups = (GroupRange(0, 4096, 1.0, 0.1),)
    updater = DeviceUpdater(adamw("bfloat16"))
    updater.update_range(Chunk(*first, gradient), STEP, groups)
    updater.update_range(Chunk(second[0].view(bits_dtype), second[1], gradient), STEP, groups)
    assert torch.equal(first[0].view(torch.int16), second[0].view(torch.int16))


def test_a_range_in_the_middle_of_a_unit():
    whole, part = on_device(ordinary(4096, 1, "bfloat16")), on_device(ordinary(4096, 1, "bfloat16"))
    gradient = as_tensor(gradient_of(4096, 1, "float32"))
    groups = (GroupRange(0, 2000, 1.0, 0.1), GroupRange(2000, 4096, 1.0, 0.0))
    updater = DeviceUpdater(adamw("bfloat16"), piece_elements=500)
    updater.update_range(Chunk(*whole, gradient), STEP, groups)
    for start, stop in ((0, 1024), (1024, 4096)):
        states = tuple(state[start:stop] for state in part[1])
        updater.update_range(Chunk(part[0][start:stop], states, gradient[start:stop], 0, start), STEP, groups)
    assert torch.equal(whole[0].view(torch.int16), part[0].view(torch.int16))
    assert all(torch.equal(a, b) for a, b in zip(whole[1], part[1], strict=True))


@pytest.mark.parametrize("gradient_dtype", GRADIENT_DTYPES)
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_temporaries_stay_below_what_is_promised(compute_dtype, gradient_dtype):
    weight, states = on_device(ordinary(NUM_ELEMENTS, 0, compute_dtype))
    gradient = as_tensor(gradient_of(NUM_ELEMENTS, 0, gradient_dtype), bfloat16=True)
    updater = DeviceUpdater(adamw(compute_dtype), piece_elements=1024)
    with StorageMeter([weight, *states, gradient]) as meter:
        updater.update_range(Chunk(weight, states, gradient), STEP, GROUPS)
    assert 16 * 1024 <= meter.peak_bytes <= updater.temporary_bytes
    assert meter.live_bytes == 0


@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_the_plan_counts_what_an_update_on_the_device_takes(compute_dtype):
    weight, states = on_device(ordinary(4096, 0, compute_dtype))
    gradient = as_tensor(gradient_of(4096, 0, "float16"))
    updater = DeviceUpdater(adamw(compute_dtype), piece_elements=4096)
    with TrafficMeter() as meter:
        updater.update_range(Chunk(weight, states, gradient), STEP, (GroupRange(0, 4096, 1.0, 0.1),))
    assert meter.num_bytes == 4096 * updater.rule.figures.device_traffic_bytes
    assert updater.temporary_bytes == 4096 * updater.rule.figures.temporary_bytes


def test_tensors_that_do_not_fit_are_refused():
    (weight, states), gradient = on_device(ordinary(64, 0, "bfloat16")), as_tensor(gradient_of(64, 0, "float32"))
    groups = (GroupRange(0, 64, 1.0, 0.0),)
    updater = DeviceUpdater(adamw("bfloat16"))
    for broken in (
        (weight.to(torch.float32), states, gradient),
        (weight, states[:2], gradient),
        (weight, (states[1], *states[1:]), gradient),
        (weight, states, gradient[:63]),
        (weight, states, gradient.to(torch.float64)),
        (weight, states, gradient.to("meta")),
    ):
        with pytest.raises(ConfigError, match=r"update: .*found"):
            updater.update_range(Chunk(*broken), STEP, groups)
    with pytest.raises(ConfigError, match="is not one of"):
        DeviceUpdater(adamw("int4"))
    with pytest.raises(ConfigError, match="positive number, found 0"):
        DeviceUpdater(adamw("bfloat16"), piece_elements=0)
