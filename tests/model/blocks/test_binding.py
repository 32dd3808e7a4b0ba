"""Parameters of a unit that is bound in each pass are made once for a buffer, and go with it.

Run: pytest tests/model/blocks/test_binding.py
"""

import weakref

import pytest
import torch
from torch import nn

from headrace.model.blocks.binding import Binding
from headrace.terms.errors import ModelError
from headrace.terms.layout import ParameterSpec, UnitLayout

LAYOUT = UnitLayout("unit", (ParameterSpec("weight", (2, 3), 0, 6, 0), ParameterSpec("bias", (2,), 6, 2, 0)), (), 8)


def bound() -> tuple[nn.Linear, Binding]:
    layer = nn.Linear(3, 2, device="meta", dtype=torch.float32)
    return layer, Binding(layer, [LAYOUT], torch.float32)


def test_a_buffer_that_is_bound_again_gives_the_parameters_that_it_gave() -> None:
    layer, binding = bound()
    first, second = (torch.arange(start, start + 8, dtype=torch.float32) for start in (0, 8))
    found = []
    for flat in (first, second, first):
        binding.bind(0, flat, None, as_loaded=True)
        found.append(layer.weight)
        assert torch.equal(layer.weight, flat[:6].view(2, 3))
        assert torch.equal(layer.bias, flat[6:])
        assert layer.weight.requires_grad
        binding.release(0)
        assert layer.weight.is_meta
    assert found[0] is found[2]
    first[0] = 42
    assert float(found[0][0, 0]) == 42
    binding.bind(0, first, None)
    assert not layer.weight.requires_grad


def test_no_parameter_outlives_its_buffer() -> None:
    layer, binding = bound()
    flat = torch.zeros(8, dtype=torch.float32)
    binding.bind(0, flat, None, as_loaded=True)
    gone = weakref.ref(layer.weight)
    binding.release(0)
    del flat
    assert gone() is None


@pytest.mark.parametrize("as_loaded", [False, True])
def test_a_buffer_of_another_shape_or_dtype_is_refused(as_loaded: bool) -> None:
    layer, binding = bound()
    for flat in (
        torch.zeros(7, dtype=torch.float32),
        torch.zeros(8, dtype=torch.bfloat16),
        torch.zeros(16, dtype=torch.float32)[::2],
    ):
        with pytest.raises(ModelError, match="expected a contiguous 1-D tensor of 8"):
            binding.bind(0, flat, None, as_loaded=as_loaded)
        assert layer.weight.is_meta
