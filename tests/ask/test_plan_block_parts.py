"""Blocks that have no room on the device are planned in parts, from a configuration alone; others are planned as before."""

import json
from pathlib import Path

import pytest

from headrace.ask.answer import plan_model
from headrace.plan.plan import Plan
from headrace.terms.options import Options
from headrace.terms.sizes import GIB, MIB

# Blocks of 1.6 GiB.
SIZES = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


@pytest.mark.deep
def test_parts_take_less_of_the_device_and_their_bytes_cost_time(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES), encoding="utf-8")

    def plan(device: str) -> tuple[Plan, float]:
        options = Options(
            machine="rtx4090-4ssd",
            host_memory="64GiB",
            device_memory=device,
            adapter="lora:rank=16",
            tokens_per_step=512,
            sequence_length=512,
        )
        answer = plan_model(tmp_path, options, here=False)
        assert answer.forecast is not None
        return answer.plan, answer.forecast.step_seconds

    (whole, seconds), (cut, more) = plan("4GiB"), plan("2300MiB")
    assert whole.parts is None
    assert cut.parts is not None
    assert cut.fits
    assert cut.peak("device") <= 2300 * MIB < 2.8 * GIB
    assert cut.parts.elements == 8192 * 28672
    # Forward, recompute and backward bring every linear module once each; only norms come as before.
    moved = sum(cut.parts.moved) * 2
    assert moved == sum(unit.num_parameters * 2 for unit in cut.units[1:3]) - 2 * 2 * 8192 * 2
    assert Plan.from_json(json.loads(json.dumps(cut.to_json()))) == cut
    assert more > seconds
