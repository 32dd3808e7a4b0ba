"""`headrace export RUN_DIR OUT.gguf`: the weights of the run's model directory; and what is refused in a line.

Run: pytest tests/cli/test_export_gguf.py
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from bad_worlds import World
from tiers import sampled

from headrace.cli import main
from headrace.model import Checkpoint
from headrace.model.gguf.gguf_directory import gguf_directory
from headrace.model.stored.safetensors_file import read_bytes


def exit_code(*words: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return int(left.value.code or 0)


def weights(model: Path) -> dict[str, torch.Tensor]:
    """Return the weights in float32: in a file norms are so, in a directory bfloat16."""
    dtypes, found = {"BF16": torch.bfloat16, "F32": torch.float32}, {}
    for name, each in Checkpoint.open(model, decode=True).tensors.items():
        content = np.concatenate([piece.copy() for piece in read_bytes(each)])
        found[name] = torch.from_numpy(content).view(dtypes[each.dtype]).float()
    return found


@pytest.mark.parametrize("adapter", sampled([False, True]), ids=["full", "merged"])
def test_a_file_has_the_weights_of_the_directory(adapter: bool, world: World) -> None:
    merge = ["--merge"] if adapter else []
    words = ["--adapter", "lora:rank=2", "--learning-rate", "1e-2"] if adapter else []
    assert exit_code(*world.train_words(*words)) == 0
    file, directory = world.folder / "out.gguf", world.folder / "out"
    if adapter:
        assert "add --merge" in world.refused("export", world.run, file)
    assert exit_code("export", world.run, directory, *merge) == 0
    assert exit_code("export", world.run, file, *merge) == 0
    found, expected = weights(gguf_directory(file, world.folder / "cache")), weights(directory)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert not [each for each in world.folder.iterdir() if each.name.startswith(".")]
    said = world.refused("export", world.run, file, *merge)
    assert "exists" in said
    said = world.refused("export", world.run, world.folder / "other.gguf", "--outtype", "q2_k", *merge)
    assert "give one of bf16, f16, q8_0" in said
    assert "give OUT.gguf" in world.refused("export", world.run, world.folder / "other", "--outtype", "f16", *merge)


def test_a_model_without_a_form_is_refused_before_anything_is_written(world: World) -> None:
    assert exit_code(*world.train_words()) == 0
    world.edit_config(model_type="olmo", architectures=["OlmoForCausalLM"])
    assert "has no form in GGUF" in world.refused("export", world.run, world.folder / "out.gguf")
