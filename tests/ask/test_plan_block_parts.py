"""Blocks that have no room on the device are planned in parts, from a configuration alone; others are planned as before."""

import json
from pathlib import Path

import pytest

from headrace.ask.answer import plan_model
from headrace.plan.value.plan import Plan
from headrace.terms.options.options import Options
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


@pytest.mark.wide
def test_a_plan_in_parts_that_is_refused_says_that_blocks_came_in_parts(tmp_path: Path) -> None:
    small = SIZES | {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(small), encoding="utf-8")
    more = {"machine": "rtx4090-4ssd", "host_memory": "16GiB", "device_memory": "100MiB"}
    answer = plan_model(tmp_path, Options(tokens_per_step=512, sequence_length=512, **more), here=False)
    assert not answer.fits
    assert (
        "The largest unit is epilogue with 31.3 MiB of weights, as blocks come in parts of at most 2 MiB already"
        in answer.reason
    )


@pytest.mark.deep
@pytest.mark.parametrize(
    ("adapter", "roomy", "tight", "whole_asks"), [("lora:rank=16", "4GiB", 2300, 2.8), (None, "8GiB", 4100, 5.2)]
)
def test_parts_take_less_of_the_device_and_their_bytes_cost_time(
    adapter: str | None, roomy: str, tight: int, whole_asks: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES), encoding="utf-8")

    def plan(device: str) -> tuple[Plan, float]:
        options = Options(
            machine="rtx4090-4ssd",
            host_memory="64GiB",
            device_memory=device,
            adapter=adapter,
            tokens_per_step=512,
            sequence_length=512,
        )
        answer = plan_model(tmp_path, options, here=False)
        assert answer.forecast is not None
        return answer.plan, answer.forecast.step_seconds

    (whole, seconds), (cut, more) = plan(roomy), plan(f"{tight}MiB")
    assert whole.parts is None
    assert cut.parts is not None
    assert cut.fits
    assert cut.peak("device") <= tight * MIB < whole_asks * GIB
    assert cut.parts.elements == 8192 * 28672
    # Forward, recompute and backward bring every linear module once each; only norms come as before.
    moved = sum(cut.parts.moved) * 2
    assert moved == sum(unit.num_parameters * 2 for unit in cut.units[1:3]) - 2 * 2 * 8192 * 2
    assert Plan.from_json(json.loads(json.dumps(cut.to_json()))) == cut
    assert more >= seconds  # pages may hide all of it
