"""Models are built by several threads of a process, as workers of a test are: what is the whole process's stays as it was."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import headrace
from headrace.model.blocks.skeleton import build_skeleton
from headrace.model.trials.instance import tiny_model

_SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def test_threads_that_build_at_once_do_so_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each puts back the default dtype that it found: that of another one, if they overlap."""
    config, build, found = LlamaConfig(**_SIZES), AutoModelForCausalLM.from_config, list[torch.dtype]()

    def slow(*args: Any, **options: Any) -> Any:
        found.append(torch.get_default_dtype())
        model = build(*args, **options)
        torch.set_default_dtype(torch.bfloat16)
        time.sleep(0.02)
        torch.set_default_dtype(torch.float32)
        return model

    def either(number: int) -> None:
        if number % 2:
            tiny_model(LlamaConfig, config.to_json_string())
        else:
            model = build_skeleton(config, torch.bfloat16)
            assert {parameter.device.type for parameter in model.parameters()} == {"meta"}

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", slow)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(either, range(12)))
    assert found == [torch.float32] * 12


def test_one_module_builds_models() -> None:
    root = Path(headrace.__file__).parent
    assert [str(path.relative_to(root)) for path in root.rglob("*.py") if "AutoModelForCausalLM" in path.read_text()] == [
        "model/blocks/building.py"
    ]
