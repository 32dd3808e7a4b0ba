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
from headrace.terms.layout import PLANE_SETS
from headrace.terms.optimizer import AdamW


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
    for compute_dtype, planes in PLANE_SETS.items():
        chain = Chain.from_config(checkpoint.config, compute_dtype, AdamW())
        weights = chain.attach(checkpoint)
        bound_bytes = import_workspace_bytes(chain.layouts, weights)
        peak_bytes = 0
        for layout in chain.layouts:
            weight = np.zeros(layout.num_elements, planes.weight.dtype)
            first = planes.states[0]
            master = np.zeros(layout.num_elements, first.dtype) if first.name in ("lo", "w") else None
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
