"""On a GPU, too, blocks that are compiled or use Liger's kernels train like the model's own code."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu_world import train

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("option", ["compile_blocks", "liger"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral-aux"])
def test_losses_and_weights_are_those_of_the_models_own_code(
    name: str, option: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    if option == "liger":
        pytest.importorskip("liger_kernel")
    own_losses, own = train(model_dir(name), tmp_path / "own", steps=5, compute_dtype="float32", max_grad_norm=0.5)
    losses, weights = train(
        model_dir(name), tmp_path / "run", steps=5, compute_dtype="float32", max_grad_norm=0.5, **{option: True}
    )
    assert losses == pytest.approx(own_losses, rel=1e-4)
    for key, want in own.items():
        torch.testing.assert_close(weights[key], want, rtol=0, atol=1e-3, msg=lambda text, key=key: f"{key}: {text}")
