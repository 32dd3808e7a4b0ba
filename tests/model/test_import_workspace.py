"""What importing a unit takes besides its planes is within the bound that the plan counts with.

Run: pytest tests/model/test_import_workspace.py
"""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from saved_models import DTYPES
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig

from headrace.model import Chain, Checkpoint, import_unit, import_workspace_bytes
from headrace.terms.layout import COMPUTE_DTYPES, planes_with, rest_of_master
from headrace.terms.options.optimizer import Optimizer


def save(directory: Path, dtype: str, kind: str) -> Path:
    if kind == "wide rows":  # experts packed in one tensor: a row is a whole expert
        config = GptOssConfig(
            vocab_size=64, hidden_size=512, intermediate_size=1536, num_hidden_layers=1, num_local_experts=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, layer_types=["full_attention"],
        )  # fmt: skip
    else:
        config = LlamaConfig(
            vocab_size=60_000, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
            tie_word_embeddings=True,
        )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("kind", ["many rows", "wide rows"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_bound_holds_for_every_plane_set(tmp_path: Path, dtype: str, kind: str) -> None:
    checkpoint = Checkpoint.open(save(tmp_path / "model", dtype, kind))
    for compute_dtype in COMPUTE_DTYPES:
        planes = planes_with(compute_dtype, ())
        chain = Chain.from_config(checkpoint.config, compute_dtype, Optimizer())
        weights = chain.attach(checkpoint)
        bound_bytes = import_workspace_bytes(chain.layouts, weights)
        peak_bytes = 0
        for layout in chain.layouts:
            weight = np.zeros(layout.num_elements, planes.weight.dtype)
            rest = rest_of_master(planes.states)
            master = np.zeros(layout.num_elements, rest.dtype) if rest else None
            tracemalloc.start()
            try:
                import_unit(weights, layout, weight, master)
                peak_bytes = max(peak_bytes, tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()
        # A hundred kilobytes for the objects of Python itself.
        assert peak_bytes <= bound_bytes + 100_000, compute_dtype
        assert peak_bytes >= bound_bytes / 5, f"{compute_dtype}: the bound is padded"
        if dtype == "bfloat16" and kind == "many rows":
            assert import_workspace_bytes(chain.layouts) == bound_bytes
