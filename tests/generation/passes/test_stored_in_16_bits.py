"""A checkpoint in float16 or float32 that is computed in bfloat16 is rounded as transformers' loader does: half to even.

Run: pytest tests/generation/passes/test_stored_in_16_bits.py
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from some_prompts import GREEDY, prompts
from transformers import AutoModelForCausalLM, LlamaConfig

from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import SeatRows
from headrace.machine.cpu import CpuMachine
from headrace.model.kernels.products import WideProducts
from headrace.terms.options.budget import Budget


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.wide)])
def test_logits_are_those_of_transformers(tied: bool, tmp_path: Path, stock: Callable[..., Any]) -> None:
    """Of float16 an eighth of all numbers is halfway between two of bfloat16."""
    torch.manual_seed(7)
    sizes = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config, dtype=torch.float16).save_pretrained(tmp_path)
    rows = prompts(2)
    with Generator.open(tmp_path, Budget(host="4GiB"), compute_dtype="bfloat16", narrow_products=False) as generator:
        generator.use(replace(generator.prepare(2, 12, 6), rows=2, seats=1))
        whole = generator.model.settings(12, None, GREEDY)
        (done,) = generator.run([SeatRows(0, tuple(map(tuple, rows)), 40, whole)])
    with nullcontext() if CpuMachine().multiplies("bfloat16") else WideProducts():
        expected = stock(tmp_path, "bfloat16", rows, 40, GREEDY)
    assert torch.equal(done.raw.sequences, expected.sequences)
    assert all(torch.equal(one, other) for one, other in zip(done.raw.logits, expected.logits, strict=True))
