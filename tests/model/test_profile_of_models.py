"""A profile counts what a model computes, and leaves the model as it was.

Run: pytest tests/model/test_profile_of_models.py
"""

import json
from typing import Any

import pytest
import torch
from tiers import sampled
from tiny_architectures import CONFIGS, make_config
from torch._subclasses.fake_tensor import FakeTensor
from transformers import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaMLP
from versions import CAUSAL_DOGE, LONG_ROPE_IN_A_PLAN

from headrace.model import Chain, MicroBatch, profile
from headrace.model.blocks.call_tensors import tensors_of
from headrace.model.trials.thresholds import architecture_key
from headrace.terms.errors import ModelError
from headrace.terms.options.optimizer import Optimizer

ROWS, LENGTH = 2, 64
SHAPE = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Queries, keys and values, the output projection, and two products of attention, for one token.
ATTENTION = 2 * 64 * (64 + 2 * 32 + 64) + 4 * LENGTH * 64


def chain_of(kind: str, dtype: str = "bfloat16", **values: Any) -> Chain:
    return Chain.from_config(CONFIG_MAPPING[kind](**SHAPE, **values), dtype, Optimizer())


def held_by_calls(chain: Chain, batch: MicroBatch) -> int:
    """Return the bytes of what blocks are called with for `batch`, by the model's own code on real numbers."""
    for unit in (0, chain.num_blocks + 1)[: 1 + chain.has_epilogue_unit]:
        chain.bind(unit, torch.zeros(chain.layouts[unit].num_elements, dtype=chain.dtype), None)
    with torch.no_grad():
        calls = chain.prologue(batch).calls
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors_of(calls)}
    return sum(held.values())


@pytest.mark.parametrize("wide", sampled([False, True]))
@pytest.mark.parametrize(
    ("kind", "values", "flops"),
    sampled(
        [
            ("llama", {}, 6 * 64 * 96),
            ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}, 2 * 6 * 64 * 96 + 2 * 64 * 8),
            (
                "qwen3_moe",
                {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "head_dim": 16},
                4 * 6 * 64 * 32 + 2 * 64 * 16,
            ),
        ]
    ),
)
def test_operations_of_a_block_are_those_of_its_products(kind: str, values: dict[str, Any], flops: int, wide: bool) -> None:
    """Of experts those that a token goes through."""
    chain = chain_of(kind, **values)
    if wide:
        chain.multiply_wide()
    costs = profile(chain, ROWS, LENGTH)
    assert costs.blocks[-1].forward_flops / (ROWS * LENGTH) == ATTENTION + flops
    assert all(operator.flops > 0 for operator in costs.blocks[-1].operators)


@pytest.mark.parametrize(("kind", "values"), sampled([("llama", {}), ("gemma3_text", {"head_dim": 16, "sliding_window": 16})]))
@pytest.mark.parametrize("rows", sampled([1, 8]))
def test_packed_rows_have_positions_of_their_own(kind: str, values: dict[str, Any], rows: int) -> None:
    """And with them rotary tables: what blocks are called with through a whole step is planned for that."""
    chain = chain_of(kind, **values)
    ids = torch.zeros((rows, LENGTH), dtype=torch.int64)
    positions = (torch.arange(LENGTH) % (LENGTH // 2)).expand(rows, LENGTH).contiguous()
    planned = profile(chain, rows, LENGTH).call_bytes
    assert planned >= held_by_calls(chain, MicroBatch(ids, ids, position_ids=positions)) > planned / 2


@pytest.mark.parametrize("kind", sampled(["opt", "gpt_oss"]))
@pytest.mark.parametrize("rows", sampled([1, 8]))
def test_masks_that_keep_samples_apart_are_counted(kind: str, rows: int) -> None:
    chain = chain_of(kind)
    assert chain.packs_by_masks
    ids = torch.zeros((rows, LENGTH), dtype=torch.int64)
    positions = (torch.arange(LENGTH) % (LENGTH // 2)).expand(rows, LENGTH).contiguous()
    held = held_by_calls(chain, MicroBatch(ids, ids, position_ids=positions))
    assert profile(chain, rows, LENGTH).call_bytes >= held >= rows * LENGTH * LENGTH


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["bloom"])
@pytest.mark.parametrize("rows", sampled([1, 8]))
def test_rows_of_models_that_run_them_by_samples_may_be_padded_and_have_masks(kind: str, rows: int) -> None:
    """Of every position with every other, which stay through a whole step and are attention's workspace besides."""
    chain = chain_of(kind)
    assert chain.runs_by_samples(LENGTH)
    planned = profile(chain, rows, LENGTH)
    ids = torch.zeros((rows, LENGTH), dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[:, LENGTH // 2 :] = 0
    held = held_by_calls(chain, MicroBatch(ids, ids, mask))
    assert planned.call_bytes >= held >= rows * LENGTH * LENGTH
    assert held > planned.call_bytes / 2
    # Attention makes of a mask one in numbers, for its own dtype.
    longer = profile(chain, rows, 8 * LENGTH)
    assert longer.blocks[0].forward_workspace_bytes >= rows * (8 * LENGTH) ** 2 * chain.dtype.itemsize


def test_draws_whether_to_skip_a_block_skip_none() -> None:
    """OPT draws a number on the host before each block and compares it with a rate; before transformers 5.23 with any rate."""
    chain = chain_of("opt")
    without = profile(chain, 1, LENGTH)
    chain.model.model.decoder.layerdrop = 1e-30
    assert profile(chain, 1, LENGTH) == without


@pytest.mark.wide
@pytest.mark.parametrize("in_float32", sampled([False, True]))
def test_hidden_states_are_as_wide_as_blocks_leave_them(in_float32: bool) -> None:
    sizes = {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16}
    shape = {key: SHAPE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    config = CONFIG_MAPPING["mamba2"](**shape, **sizes, residual_in_fp32=in_float32)
    costs = profile(Chain.from_config(config, "bfloat16", Optimizer()), ROWS, LENGTH)
    assert costs.hidden_size_bytes == 64 * (4 if in_float32 else 2)
    # The first block gets bfloat16 in either case, the second what the first leaves.
    first, second = costs.blocks
    assert (first.forward_workspace_bytes != second.forward_workspace_bytes) == in_float32


@pytest.mark.wide
@LONG_ROPE_IN_A_PLAN
def test_what_a_model_keeps_of_a_run_is_not_kept_of_a_profile() -> None:
    """Long rows take another rotary table, which the model makes when it first sees one and copies from ever after."""
    chain = chain_of(
        "phi3",
        "float32",
        max_position_embeddings=4 * LENGTH,
        original_max_position_embeddings=LENGTH // 4,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "long_factor": [4.0 + index for index in range(8)],
            "short_factor": [1.0] * 8,
            "original_max_position_embeddings": LENGTH // 4,
        },
    )
    before = {name: buffer.clone() for name, buffer in chain.model.named_buffers()}
    profile(chain, ROWS, LENGTH)
    left = [value for module in chain.model.modules() for value in (*vars(module).values(), *module._buffers.values())]
    assert not any(isinstance(value, FakeTensor) for value in left)
    for name, buffer in chain.model.named_buffers():
        assert torch.equal(buffer, before[name]), name


@pytest.mark.wide
def test_outputs_that_a_block_writes_into_must_be_computed_again() -> None:
    clipped = profile(chain_of("olmo", clip_qkv=0.5), 1, LENGTH).blocks[0]
    plain = profile(chain_of("olmo"), 1, LENGTH).blocks[0]
    assert [operator.must_run for operator in clipped.operators[:4]] == [True, True, True, False]
    assert not any(operator.must_run for operator in plain.operators)
    assert plain.skippable
    assert clipped.skippable == plain.skippable


@pytest.mark.wide
@CAUSAL_DOGE
def test_a_block_that_goes_another_way_with_a_graph_is_recomputed_whole() -> None:
    found = profile(chain_of("doge", "float32"), 1, LENGTH).blocks[0]
    assert found.operators
    assert all(operator.must_run for operator in found.operators)
    assert not found.skippable


@pytest.mark.wide
def test_tables_that_grow_with_the_row_cost_what_others_do() -> None:
    """Code that looks at values, but only to decide which numbers a table has; longer rows are run sample by sample."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    found = profile(chain_of("llama", max_position_embeddings=LENGTH + 1, rope_parameters=rope), ROWS, LENGTH)
    plain = profile(chain_of("llama", max_position_embeddings=LENGTH + 1), ROWS, LENGTH)
    assert found.blocks == plain.blocks
    assert found.call_bytes == plain.call_bytes


def test_code_that_looks_at_values_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2 if hidden.sum() > 0 else hidden

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM: .*depends on values.*local_scalar.*here it is 5\.[^\n]*$"):
        profile(chain_of("llama"), ROWS, LENGTH)


@pytest.mark.parametrize("operator", ["bmm", "unique"])
def test_code_that_fails_without_values_is_refused_with_the_operator_in_one_line(
    operator: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * torch.unique(hidden)[0] if operator == "unique" else hidden.float() @ hidden.mT

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    with pytest.raises(ModelError, match=rf"^LlamaForCausalLM: .*{operator}[^\n]*$"):
        profile(chain_of("llama"), ROWS, LENGTH)
    assert not caplog.records  # torch writes a traceback into its log


@pytest.mark.wide
def test_experts_that_look_for_their_tokens_are_planned_as_if_one_got_all() -> None:
    """No more operations than there are, but for a token that each other expert gets; and memory for the worst."""
    found = profile(Chain.from_config(make_config(CONFIGS["dbrx"]), "float32", Optimizer()), 1, LENGTH).blocks[0]
    assert not found.operators
    expert_flops = 2 * 3 * 32 * 48
    routed, of_others = 2 * LENGTH * expert_flops, 4 * expert_flops
    assert routed <= found.forward_flops - found.attention_flops <= routed + of_others + 2 * LENGTH * 32 * (32 * 3 + 4)


@pytest.mark.wide
@pytest.mark.parametrize("kind", sampled(["ernie4_5_moe", "afmoe"], ["ernie4_5_moe"]))
def test_parameters_that_the_architecture_freezes_stop_no_profile(kind: str) -> None:
    assert profile(Chain.from_config(CONFIG_MAPPING[kind](), "bfloat16", Optimizer()), 1, 16).blocks[-1].operators


@pytest.mark.deep
def test_all_residual_streams_of_a_token_are_counted() -> None:
    """DeepSeek-V4 and Qwen4-Exp hand on several for each."""
    config = CONFIG_MAPPING["deepseek_v4"]()
    small = CONFIG_MAPPING["deepseek_v4"](**json.loads(architecture_key(config)))
    costs = profile(Chain.from_config(small, "bfloat16", Optimizer()), 1, 16)
    assert costs.hidden_size_bytes >= 2 * small.hidden_size * config.hc_mult > 2 * small.hidden_size
