"""What a GPU's attention keeps is known on a machine without one: with dropout as much as without.

Run: pytest tests/model/test_profile_for_gpu.py
"""

import pytest
from tiers import sampled
from transformers import GPT2Config, LlamaConfig

from headrace.model import Chain, profile
from headrace.terms.costs import ATTENTION, BlockCosts
from headrace.terms.options.optimizer import Optimizer

LENGTH, HEADS = 256, 8


def block(dropout: float, *, for_gpu: bool) -> BlockCosts:
    config = GPT2Config(
        vocab_size=128, n_embd=64, n_layer=2, n_head=HEADS, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=dropout,
    )  # fmt: skip
    return profile(Chain.from_config(config, "bfloat16", Optimizer()), 1, LENGTH, for_gpu=for_gpu).blocks[0]


@pytest.mark.wide
@pytest.mark.parametrize(
    "field", sampled(["forward_workspace_bytes", "backward_workspace_bytes", "forward_flops", "attention_flops"])
)
def test_dropout_in_attention_costs_a_gpu_nothing(field: str) -> None:
    assert getattr(block(0.1, for_gpu=True), field) == getattr(block(0.0, for_gpu=True), field)


@pytest.mark.wide
def test_attention_is_kept_unless_it_drops() -> None:
    """What draws numbers after it would draw others if it had not run."""
    assert [operator.must_run for operator in block(0.1, for_gpu=True).operators] == [
        operator.name == ATTENTION for operator in block(0.0, for_gpu=True).operators
    ]
    assert not any(operator.must_run for operator in block(0.1, for_gpu=False).operators)  # in pieces, and these do not draw
    assert not any(operator.must_run for operator in block(0.0, for_gpu=True).operators)


@pytest.mark.wide
def test_the_cpu_has_all_scores_in_memory_with_dropout() -> None:
    scores_bytes = 2 * HEADS * LENGTH * LENGTH
    here, there = block(0.1, for_gpu=False), block(0.1, for_gpu=True)
    assert here.backward_workspace_bytes > there.backward_workspace_bytes + scores_bytes
    here, there = block(0.0, for_gpu=False), block(0.0, for_gpu=True)
    assert here.operators == there.operators
    assert here.forward_flops == there.forward_flops


def test_weights_and_inputs_are_no_workspace_of_a_gpu() -> None:
    """They have rows of their own in a plan: what a block of two products makes is small beside its weights."""
    config = LlamaConfig(vocab_size=32000, hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4)
    chain = Chain.from_config(config, "bfloat16", Optimizer())
    few = profile(chain, 1, 16, for_gpu=True)
    flat_bytes = 2 * few.blocks[0].num_elements
    gradients_bytes = max(2 * parameter.num_elements for parameter in chain.layouts[1].parameters)
    made_bytes = 16 * 2 * (4 * 256 + 3 * 1024)  # hidden states of the block and the three wide ones of its products
    assert few.blocks[0].forward_workspace_bytes < 4 * made_bytes < flat_bytes / 2
    assert few.blocks[0].backward_workspace_bytes < 2 * gradients_bytes + 4 * made_bytes
    head_bytes = 2 * chain.layouts[-1].num_elements
    assert head_bytes <= dict(few.epilogue_workspace_bytes)[16] < 1.5 * head_bytes  # its gradient, logits in float32
    here = profile(chain, 1, 16)
    assert here.blocks[0].forward_workspace_bytes >= flat_bytes  # on a CPU: what libraries pack
