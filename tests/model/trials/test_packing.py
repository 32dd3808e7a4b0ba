"""Packed rows give the loss and the gradients of their samples alone, by positions, by masks, or sample by sample."""

from typing import Any

import pytest
import torch
from tiers import sampled
from tiny_architectures import CONFIGS, flats_of, make_config, make_plain
from transformers import CONFIG_MAPPING

from headrace.model import IGNORED, Chain, MicroBatch
from headrace.model.costs.cost_profile import profile
from headrace.model.trials.block_major import block_major_backward
from headrace.model.trials.instance import tiny_runner
from headrace.model.trials.probe import probe
from headrace.model.trials.thresholds import architecture_key
from headrace.terms.options.optimizer import Optimizer

LENGTHS = (9, 7, 5)
PACKED_BY_MASKS = ("opt", "gpt-oss", "falcon")


@pytest.mark.parametrize("name", PACKED_BY_MASKS)
def test_a_packed_row_computes_what_its_samples_do_alone(name: str) -> None:
    config = make_config(CONFIGS[name])
    plain = make_plain(config).eval()
    chain = Chain.from_config(config, "float32", Optimizer())
    assert chain.packs_by_masks
    chain.model.eval()
    for unit, flat in enumerate(flats_of(chain, plain)):
        chain.bind(unit, flat, None)
    ids = torch.randint(2, 160, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1).contiguous()
    with torch.no_grad():
        start = chain.prologue(MicroBatch(ids, ids, position_ids=positions))
        hidden = start.hidden
        for index, call in enumerate(start.calls):
            hidden = chain.block(index, hidden, call).hidden
        targets = torch.cat([torch.nn.functional.pad(part[:, 1:], (0, 1), value=IGNORED) for part in ids.split(LENGTHS, 1)], 1)
        packed = float(chain.loss_sum(ids, hidden, targets))
        alone = 0.0
        for part in ids.split(LENGTHS, 1):
            logits = plain(part, use_cache=False).logits[:, :-1]
            alone += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    assert packed == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("kind", sampled(("afmoe", "gpt_oss", "falcon", "mpt", "opt", "xglm", "biogpt"), ("gpt_oss", "mpt")))
def test_masks_keep_samples_apart(kind: str) -> None:
    traits = probe(CONFIG_MAPPING[kind]())
    assert traits.packs_by_masks
    assert traits.packing_limit is None


BY_SAMPLES = (
    "bailing_hybrid",
    "bamba",
    "bloom",
    "deepseek_v4",
    "falcon_h1",
    "jamba",
    "kimi_linear",
    "lfm3",
    "mamba2",
    "minimax",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "recurrent_gemma",
)


@pytest.mark.parametrize(
    "kind", sampled(("llama", "gpt_oss", "mpt", *BY_SAMPLES), ("llama", "gpt_oss", "lfm3", "nemotron_h", "qwen3_next"))
)
def test_gradients_of_packed_rows_are_those_of_separate_samples(kind: str) -> None:
    """In float64, beside plain PyTorch on each sample by itself; rows differ in where their samples begin."""
    config = CONFIG_MAPPING[kind]()
    traits, runner = probe(config), tiny_runner(type(config), architecture_key(config))
    assert (traits.samples_from == 0) == (kind in BY_SAMPLES)
    runner.packs_by_masks, runner.samples_from = traits.packs_by_masks, traits.samples_from
    model, rows = runner.model.double(), (LENGTHS, (4, 17))
    model.config._experts_implementation = "eager"  # grouped products have no float64
    ids = torch.randint(2, 90, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    samples = [part for row, lengths in zip(ids, rows, strict=True) for part in row[None].split(lengths, 1)]
    trained = sum(part.shape[1] - 1 for part in samples)
    tolerance = 1e-4 if kind in BY_SAMPLES else 2e-6  # states, compressed keys and some norms are float32 in any case
    expected_loss = 0.0
    for part in samples:
        logits = model(part, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum") / trained
        loss.backward()
        expected_loss += float(loss.detach())
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)

    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in rows])
    labels = torch.where(positions == 0, IGNORED, ids)
    assert block_major_backward(runner, [MicroBatch(ids, labels, position_ids=positions)]) == pytest.approx(expected_loss)
    for name, gradient in expected.items():
        found = model.get_parameter(name).grad
        assert found is not None, name
        assert float((found - gradient).abs().max()) <= tolerance * float(gradient.abs().max()) + 1e-9, name


@pytest.mark.wide
@pytest.mark.parametrize("kind", sampled(BY_SAMPLES, ("qwen3_next", "deepseek_v4")))
def test_layers_with_a_state_are_packed_sample_by_sample_and_it_is_said_why(kind: str) -> None:
    traits: Any = probe(CONFIG_MAPPING[kind]())
    assert traits.runs_by_samples
    assert traits.packing_limit == 0
    assert "see each other" in traits.packing_reason


@pytest.mark.wide
def test_what_is_run_sample_by_sample_is_planned_without_replay_and_with_room_for_what_waits() -> None:
    chain = Chain.from_config(make_config(CONFIGS["nemotron-h"]), "float32", Optimizer())
    costs = profile(chain, 2, 16)
    assert costs.by_samples
    assert not any(block.operators or block.skippable for block in costs.blocks)
    chain.runner.samples_from = None
    whole = profile(chain, 2, 16)
    waiting_bytes = 2 * 16 * 32 * 4
    for block, alone in zip(costs.blocks, whole.blocks, strict=True):
        assert block.forward_workspace_bytes == alone.forward_workspace_bytes + 2 * waiting_bytes
        assert block.backward_workspace_bytes == alone.backward_workspace_bytes + 3 * waiting_bytes


def test_samples_are_not_compiled_for_each_length_is_another_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*args: Any) -> Any:
        raise AssertionError("compiled for a sample")

    for name in ("check_compiler", "check_compiles"):
        monkeypatch.setattr(f"headrace.model.chain.chain.{name}", lambda *args: None)
    monkeypatch.setattr("headrace.model.chain.chain.CompiledBlocks", lambda: compiled)
    config = make_config(CONFIGS["bloom"])
    config.hidden_dropout = config.attention_dropout = 0.0
    chain = Chain.from_config(config, "float32", Optimizer())
    for unit, flat in enumerate(flats_of(chain, make_plain(config))):
        chain.bind(unit, flat, None)
    chain.compile_blocks()
    ids = torch.randint(2, 160, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    start = chain.prologue(MicroBatch(ids, ids, position_ids=positions))
    assert chain.block(0, start.hidden, start.calls[0]).hidden.shape == start.hidden.shape
    with pytest.raises(AssertionError, match="compiled for a sample"):
        chain.block(0, start.hidden, chain.prologue(MicroBatch(ids, ids)).calls[0])
