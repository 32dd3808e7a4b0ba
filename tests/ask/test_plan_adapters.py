"""What `headrace plan` says of adapters beside frozen weights: bytes of a step, and that they are offered."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from headrace.ask.answer import plan_model
from headrace.ask.plan_report import PlanReport
from headrace.terms.options.options import Options

SHAPE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 4096}


def report(tmp_path: Path, **options: Any) -> PlanReport:
    LlamaConfig(**SHAPE, max_position_embeddings=4096, tie_word_embeddings=False, dtype="bfloat16").save_pretrained(tmp_path)
    more = {"sequence_length": 128, "tokens_per_step": 1024, **options}
    return plan_model(tmp_path, Options(machine="rtx4090-1ssd", **more), here=False)


@pytest.mark.wide
def test_adapters_alone_are_written_and_frozen_weights_lie_once(tmp_path: Path) -> None:
    found = report(tmp_path, adapter="lora:rank=8")
    assert found.plan is not None
    assert found.forecast is not None
    numbers = 4 * 8 * (4 * (512 + 512) + 3 * (512 + 1408))
    assert sum(unit.gradient_elements for unit in found.plan.units) == pytest.approx(numbers, rel=0.02)
    assert found.forecast.ssd_bytes_written_per_step == pytest.approx(12 * numbers, rel=0.02)
    assert found.plan.peak("ssd") == pytest.approx(2 * found.parameters + 24 * numbers, rel=0.02)


@pytest.mark.deep
def test_adapters_are_offered_where_the_drive_limits_a_step(tmp_path: Path) -> None:
    found = report(tmp_path, host_memory="600MiB")
    changes = [each for each in found.alternatives if "adapter" in each.options]
    assert [each.options for each in changes] == [{"adapter": "lora"}]
    assert "not full fine-tuning" in changes[0].change
