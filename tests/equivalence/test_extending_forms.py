"""The worked examples of docs/extending.md train: the wire only what it says, the code as compute sees it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from extending import apply, run
from plain import train
from safetensors.torch import load_file

from headrace.engine.seams import Seams

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


# Trains two steps at once, and once more with an end between them; the command knows the wire, too.
RUN = """
import json, sys
from pathlib import Path
import torch
from headrace import Engine, Options
from headrace.ask.answer import plan_model
model, folder = map(Path, sys.argv[1:])
given = dict(gradient="vectors:every=2", learning_rate=1e-2, tokens_per_step=64, sequence_length=32, host_memory="4GiB")
batches = [torch.randint(3, 384, (2, 32), generator=torch.Generator().manual_seed(step)) for step in range(2)]
for name, parts in {"whole": [batches], "resumed": [batches[:1], batches[1:]]}.items():
    for part in parts:
        begins = part[0] is batches[0]
        options = Options(output=folder / name, **given)
        with Engine.open(model, options) if begins else Engine.resume(folder / name) as engine:
            for tokens in part:
                engine.step({"input_ids": tokens, "labels": tokens})
            if part[-1] is batches[-1]:
                engine.save_pretrained(folder / f"{name}-out")
print(json.dumps([unit.trained_elements for unit in plan_model(model, options).plan.units]))
"""


def example(name: str) -> Any:
    """Return what the page calls `name`."""
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


@pytest.mark.wide
def test_a_wire_is_one_file(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    (touched,) = apply("A wire", tmp_path)
    assert touched.startswith("headrace/update/wires/")
    path = model_dir("llama", "bfloat16")
    trained = json.loads(run(tmp_path, "-c", RUN, path, tmp_path))
    assert [bool(each) for each in trained] == [each in (2, 4) for each in range(len(trained))]
    whole, resumed = (load_file(tmp_path / f"{name}-out" / "model.safetensors") for name in ("whole", "resumed"))
    for name, before in load_file(path / "model.safetensors").items():
        block = re.search(r"layers\.(\d+)\.", name)
        changes = block is not None and int(block[1]) % 2 == 1 and before.dim() == 1
        assert torch.equal(whole[name], before) != changes, name
        assert torch.equal(whole[name], resumed[name]), name
