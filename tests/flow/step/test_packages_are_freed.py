"""What waits for backward is freed when its last user is done, not when the garbage collector happens to run."""

import gc
import weakref

import torch

from headrace.flow.step.stash import _tensors
from headrace.flow.step.step_state import Package


def test_a_package_that_was_looked_through_dies_with_its_last_reference() -> None:
    inner = torch.ones(3)
    package = Package(torch.ones(2), {0: ("operator", (inner, torch.ones(1)))})
    seen = weakref.ref(inner)
    gc.disable()
    try:
        tensors = _tensors(package)
        assert len(tensors) == 3
        del package, inner, tensors
        assert seen() is None
    finally:
        gc.enable()
