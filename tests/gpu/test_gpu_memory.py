"""The plan's device memory holds on a GPU whose memory is capped to that of smaller cards, and at the least that can do."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import headrace
from headrace.engine.trainer import Engine
from headrace.plan.value.words import explain_plan
from headrace.terms.errors import PlanInfeasible
from headrace.terms.sizes import GIB, MIB, format_bytes, round_up

pytestmark = pytest.mark.gpu
LENGTH = 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a model of 0.16 billion parameters with blocks and a vocabulary large enough to matter."""
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def measured_and_planned(model: Path, run: Path, device_bytes: int, tokens_per_step: int) -> tuple[int, int]:
    with Engine.open(
        model,
        headrace.Options(
            device_memory=device_bytes,
            host_memory="8GiB",
            learning_rate=1e-4,
            output=run,
            tokens_per_step=tokens_per_step,
            sequence_length=LENGTH,
            max_grad_norm=1.0,
        ),
    ) as engine:
        assert engine.plan is not None
        planned = engine.plan.peak("device")
        explained = explain_plan(engine.plan)
        ids = torch.randint(3, 32000, (tokens_per_step // LENGTH, LENGTH), generator=torch.Generator().manual_seed(1))
        measured = max(engine.step({"input_ids": ids, "labels": ids}).peak_bytes["device"] for _ in range(3))
    assert measured <= planned, f"measured {format_bytes(measured)}, planned {format_bytes(planned)}\n{explained}"
    return measured, planned


@pytest.mark.parametrize("card_gib", [8, 16, 24])
def test_measured_peak_is_within_plan_and_card(card_gib: int, gpu: torch.device, model: Path, tmp_path: Path) -> None:
    if torch.cuda.get_device_properties(gpu).total_memory < card_gib * GIB:
        pytest.skip(f"this GPU has less than {card_gib} GiB")
    measured, planned = measured_and_planned(model, tmp_path / "run", card_gib * GIB, 32 * LENGTH)
    assert measured <= planned <= card_gib * GIB


def test_the_least_memory_that_the_planner_asks_for_is_enough(model: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanInfeasible) as refused:
        measured_and_planned(model, tmp_path / "refused", 64 * MIB, 4 * LENGTH)
    assert refused.value.tier == "device"
    least = round_up(refused.value.needed_bytes, 64 * MIB)
    measured, planned = measured_and_planned(model, tmp_path / "run", least, 4 * LENGTH)
    assert measured <= planned <= least
    assert planned > 0.8 * least, "what is asked for is no longer the least"
