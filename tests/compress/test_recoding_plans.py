"""Plans of a lossless code: the bytes that the files will have, and plain weights where decoding would not pay.

Run: pytest tests/compress/test_recoding_plans.py
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressing import write_model
from test_recoding import TO, asked
from tiers import sampled

from headrace.compress.planner import plan_compression
from headrace.compress.recoding import recode
from headrace.generate.passes.asked import plan_generation
from headrace.plan.clock.machine_profiles import load_profile
from headrace.plan.value.decoding import making_like, why_no_gain
from headrace.terms.errors import ConfigError
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.budget import Budget
from headrace.terms.options.generate_options import GenerateOptions

COUNTS = {"prompts": 1, "prompt_length": 8, "new_tokens": 4}
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64}


def machine(read_bytes_per_second: float, cores: int = 2, **more: Any) -> Ceilings:
    """Return a machine without a device, with one drive."""
    found = load_profile("rtx4090-1ssd")
    drive = replace(found.drives[0], read_bytes_per_second=read_bytes_per_second)
    return replace(found, has_device=False, device_memory_bytes=0, drives=(drive,), cores=cores, **more)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), **SIZES)


def planned(model: Path, here: Ceilings, name: str | None = TO) -> Any:
    options = GenerateOptions.of({"host_memory": "500MiB"})
    return plan_generation(str(model), options, here, here=False, compress=name, **COUNTS)


@pytest.mark.wide
@pytest.mark.parametrize("kind", sampled(["llama", "tied", "mixtral"], ["tied"]))
def test_a_plan_has_the_bytes_of_the_files(kind: str, tmp_path: Path) -> None:
    more = {"llama": SIZES, "tied": {**SIZES, "tie_word_embeddings": True}, "mixtral": {"hidden_size": 256, "head_dim": 64}}
    model = write_model(tmp_path / "model", "mixtral" if kind == "mixtral" else "llama", **more[kind])
    before = plan_compression(model, TO, "rtx4090-1ssd")
    result = recode(asked(model, tmp_path))
    assert before.total_bytes == pytest.approx(result.bytes_after, rel=0.02)
    assert before.coded_parameters == result.weights
    assert before.tokens == 0
    assert "calibration" not in before.explain()
    assert before.seconds.keys() == {"weights read", "encoding on the host's cores", "result written"}
    options = GenerateOptions.of({"host_memory": "4GiB"})
    coded = plan_generation(str(tmp_path / "out"), options, machine(1e9), here=False, **COUNTS)
    plan = plan_generation(str(model), options, machine(1e9), here=False, compress=TO, **COUNTS)
    if plan.uncoded is not None:  # else plain weights are as fast: all of them stay
        assert [unit.decodes for unit in plan.units] == [unit.decodes for unit in coded.units]


@pytest.mark.deep
def test_plain_weights_are_planned_where_nothing_is_read(model: Path) -> None:
    plan = plan_generation(str(model), GenerateOptions(), machine(3e11), here=False, compress=TO, **COUNTS)
    assert not any(unit.decodes for unit in plan.units)
    assert any(note.startswith("bf16x12 is not used: ") for note in plan.results.notes), plan.results.notes


@pytest.mark.wide
@pytest.mark.parametrize(
    ("read", "decoded"),
    sampled(itertools.product((1e8, 1e9, 3e9, 3e10, 3e11), (1e8, 5e9)), [(1e9, 5e9), (3e9, 1e8)]),
)
def test_it_is_planned_only_where_it_is_faster(read: float, decoded: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    """From a drive that cannot keep up with decoding, and not from a faster one, which is said."""
    folder = tmp_path_factory.mktemp("large")
    config = write_model(folder, hidden_size=64)
    text = (config / "config.json").read_text()
    for name, value in {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "vocab_size": 512}.items():
        old = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 320}[name]
        text = text.replace(f'"{name}": {old}', f'"{name}": {value}')
    text = text.replace('"head_dim": 16', '"head_dim": 128').replace('"num_attention_heads": 4', '"num_attention_heads": 16')
    (config / "config.json").write_text(text)
    here = machine(read, cores=1, decoded_per_second={TO: decoded})
    options = GenerateOptions.of({"host_memory": "1GiB"})
    plan = plan_generation(str(config / "config.json"), options, here, here=False, compress=TO, **COUNTS)
    plain = plan_generation(str(config / "config.json"), options, here, here=False, **COUNTS)
    said = [note for note in plan.results.notes if note.startswith("bf16x12 is not used")]
    assert plan.forecast is not None
    assert plain.forecast is not None
    assert plan.forecast.tokens_per_second >= plain.forecast.tokens_per_second
    assert bool(said) == (plan.uncoded is None) == (not any(unit.decodes for unit in plan.units))
    if 2 * decoded < read:
        assert "it is decoded at" in said[0]
        assert "the drives read" in said[0]
    if 2 * decoded > 4 * read:
        assert not said
    assert bool(why_no_gain(TO, here)) == (2 * decoded <= read)
    assert ("would not be faster" in (plan_compression(config, TO, here).warning or "")) == (2 * decoded <= read)


def test_all_cores_decode_and_a_device_needs_none() -> None:
    one, many = machine(1e9, cores=1), machine(1e9, cores=4)
    weights = 1 << 30
    assert making_like(((TO, weights),), many) == pytest.approx(making_like(((TO, weights),), one) / 4, rel=0.01)
    assert making_like((("trits", weights),), many) == making_like((("trits", weights),), one)
    device = load_profile("rtx4090-4ssd")
    assert making_like(((TO, weights),), device) == 0
    assert why_no_gain(TO, device) == ""


@pytest.mark.parametrize("dtype", sampled(["float32", "float16"], ["float16"]))
def test_a_model_of_another_dtype_is_refused(dtype: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", dtype=getattr(torch, dtype))
    for ask in (lambda: plan_compression(model, TO, "rtx4090-1ssd"), lambda: planned(model, machine(1e9))):
        with pytest.raises(ConfigError, match=f"compress: bf16x12 codes bfloat16 as it is, the model's weights are {dtype}"):
            ask()


def test_little_memory_is_said(model: Path) -> None:
    found = plan_compression(model, TO, machine(1e9), budget=Budget(host=1 << 20))
    assert "host memory: it takes" in (found.warning or "")
    assert plan_compression(model, TO, machine(1e9), budget=Budget(host="1GiB")).warning == ""
