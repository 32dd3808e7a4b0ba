"""Models are built by several threads of a process, as workers of a test are: what is the whole process's stays as it was."""

from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import LlamaConfig

from headrace.model.skeleton import build_skeleton


def test_threads_that_build_at_once_leave_the_default_dtype() -> None:
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda _: build_skeleton(config, torch.bfloat16), range(12)))
    assert torch.get_default_dtype() == torch.float32
    assert {parameter.device.type for model in models for parameter in model.parameters()} == {"meta"}
