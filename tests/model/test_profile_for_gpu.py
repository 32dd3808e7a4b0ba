"""What a GPU's attention keeps is known on a machine without one: with dropout as much as without.

Run: pytest tests/model/test_profile_for_gpu.py
"""

import pytest
from transformers import GPT2Config

from headrace import AdamW
from headrace.model import Chain, profile
from headrace.spec.costs import ATTENTION, BlockCosts

LENGTH, HEADS = 256, 8


def block(dropout: float, *, for_gpu: bool) -> BlockCosts:
    config = GPT2Config(
        vocab_size=128, n_embd=64, n_layer=2, n_head=HEADS, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=dropout,
    )  # fmt: skip
    return profile(Chain.from_config(config, "bfloat16", AdamW()), 1, LENGTH, for_gpu=for_gpu).blocks[0]


@pytest.mark.parametrize("field", ["forward_workspace_bytes", "backward_workspace_bytes", "forward_flops", "attention_flops"])
def test_dropout_in_attention_costs_a_gpu_nothing(field: str) -> None:
    assert getattr(block(0.1, for_gpu=True), field) == getattr(block(0.0, for_gpu=True), field)


def test_attention_is_kept_unless_it_drops() -> None:
    """What draws numbers after it would draw others if it had not run."""
    assert [operator.random for operator in block(0.1, for_gpu=True).operators] == [
        operator.name == ATTENTION for operator in block(0.0, for_gpu=True).operators
    ]
    assert not any(operator.random for operator in block(0.1, for_gpu=False).operators)  # in pieces, and these do not draw
    assert not any(operator.random for operator in block(0.0, for_gpu=True).operators)


def test_the_cpu_has_all_scores_in_memory_with_dropout() -> None:
    scores_bytes = 2 * HEADS * LENGTH * LENGTH
    here, there = block(0.1, for_gpu=False), block(0.1, for_gpu=True)
    assert here.backward_workspace_bytes > there.backward_workspace_bytes + scores_bytes
    assert block(0.0, for_gpu=False) == block(0.0, for_gpu=True)
