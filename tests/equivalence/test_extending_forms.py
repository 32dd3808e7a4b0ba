"""The worked examples of docs/extending.md train: the wire only what it says, the code as compute sees it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from plain import train
from safetensors.torch import load_file

from headrace.engine.seams import Seams

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def example(name: str) -> Any:
    """Return the class `name` of the page."""
    (code,) = (
        code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL) if f"class {name}" in code
    )
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, str(PAGE), "exec"), names)
    return names[name]


def test_the_wire_and_the_code(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("llama", "bfloat16")
    seams = Seams(example("VectorWire")(), example("UpperByte")())
    losses, weights = train(path, tmp_path / "run", seams=seams, learning_rate=1e-2)
    assert losses[-1] != losses[0]
    for name, before in load_file(path / "model.safetensors").items():
        in_block, vector = ".layers." in name, before.dim() == 1
        upper = (before.view(torch.int16) >> 8 << 8).view(torch.bfloat16)
        if in_block and vector:
            assert not torch.equal(weights[name], before), f"{name} is trained"
        else:
            assert torch.equal(weights[name], upper if in_block else before), f"{name} is not trained"
