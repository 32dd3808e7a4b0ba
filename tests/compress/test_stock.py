"""What is written loads in stock transformers with compressed-tensors, as it decodes here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressing import run, write_model
from test_compression import decoded
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3_moe", "uneven"])
def test_logits_are_equal(kind: str, tmp_path: Path) -> None:
    # "uneven": widths that take groups of different sizes.
    sizes: dict[str, Any] = {"uneven": {"intermediate_size": 160}, "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2}}
    more = {"moe_intermediate_size": 96, "head_dim": 16} if kind == "qwen3_moe" else {}
    model = write_model(tmp_path / "model", "llama" if kind == "uneven" else kind, **sizes.get(kind, {}), **more)
    run(model, tmp_path, group_size=64)
    weights = decoded(tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, experts_implementation="eager").eval()
    folder = tmp_path / "decoded"
    folder.mkdir()
    from safetensors.torch import save_file

    save_file({key: value.contiguous() for key, value in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    plain.config.save_pretrained(folder)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, experts_implementation="eager").eval()
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16, experts_implementation="eager").eval()
    ids = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, stock(ids).logits)
        assert not torch.equal(plain(ids).logits, stock(ids).logits)
