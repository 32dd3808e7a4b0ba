"""The own loss of docs/extending.md trains."""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def test_the_own_loss_of_the_page_trains_and_tells_its_figures(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n# own_loss.py\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes)).save_pretrained(tmp_path / "model")
    ids = torch.randint(3, 96, (4, 16))
    results = names["train"](tmp_path / "model", tmp_path / "run", [{"input_ids": ids, "labels": ids}] * 6)
    assert results[-1].loss < results[0].loss
    assert 0 <= results[0].metrics["focal/sure"] <= 1
