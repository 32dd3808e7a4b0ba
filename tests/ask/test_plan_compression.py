"""`headrace plan --compress`: sizes and times of a compression from a configuration alone.

Run: pytest tests/ask/test_plan_compression.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.compress.planner import CompressionReport, plan_compression
from headrace.terms.errors import ConfigError
from headrace.terms.options.budget import Budget

C2048 = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 2080,
    "intermediate_size": 6144,
    "num_local_experts": 2048,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 130,
    "vocab_size": 32128,
    "max_position_embeddings": 2048,
}


@pytest.fixture(scope="module")
def c2048(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("c2048") / "config.json"
    path.write_text(json.dumps(C2048))
    return path


def test_the_claim_of_qmoe_on_its_shapes(c2048: Path) -> None:
    """1.6 trillion parameters, 2048 experts of 2080 x 6144 a block: below 160 GB and a day on an A6000."""
    found = plan_compression(c2048, "ternary", "a6000-1ssd")
    assert 1.5e12 < found.parameters < 1.7e12
    assert found.total_bytes < 160e9
    assert found.bits_per_parameter <= 0.82
    assert found.total_seconds < 24 * 3600
    assert found.modern_bytes is not None
    assert found.modern_bytes > 190e9, "other shares of zeros are said, too"
    # By hand: two matrices of 6144 x 2080 and one of 2080 x 6144 for each expert, 0.736 bits and 64 bits a row.
    weights = 20 * 2048 * 3 * 2080 * 6144
    assert found.coded_parameters == weights
    bits = 0.736 + 64 * (2 / 2080 + 1 / 6144) / 3
    assert found.result_bytes["ternary matrices"] == pytest.approx(weights * bits / 8, rel=1e-9)
    assert found.tokens == 2048 * 6144
    assert found.seconds["weights read"] == pytest.approx(2 * found.parameters / 7e9)


def test_int4_codes_all_matrices_of_blocks(c2048: Path) -> None:
    found = plan_compression(c2048, "int4", "a6000-1ssd")
    assert 4.125 <= found.bits_per_parameter < 4.2
    assert found.modern_bytes is None
    assert found.parameters - found.coded_parameters < 0.01 * found.parameters


def test_more_of_the_machine_is_never_slower(c2048: Path) -> None:
    one, four = (plan_compression(c2048, "ternary", f"a6000-{drives}ssd") for drives in (1, 4))
    assert four.total_seconds < one.total_seconds
    assert four.result_bytes == one.result_bytes


def test_the_command_says_it_term_by_term(c2048: Path) -> None:
    words = ["plan", str(c2048), "--compress", "ternary", "--machine", "a6000-1ssd"]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0, said.output
    for label in ("weights read", "GPTQ's factors", "sums of inputs", "result in all", "bits a parameter"):
        assert label in said.output
    as_json = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    again = plan_compression(c2048, "ternary", "a6000-1ssd")
    assert as_json["total_seconds"] == again.total_seconds
    assert isinstance(again, CompressionReport)
    assert sum(as_json["seconds"].values()) == pytest.approx(as_json["total_seconds"])
    with pytest.raises(ConfigError, match="compress: expected int4 or ternary or sparse50 or bf16x12, found 'int3'"):
        plan_compression(c2048, "int3", "a6000-1ssd")


def test_a_machine_that_nobody_measured_is_a_nominal_one(c2048: Path) -> None:
    found = plan_compression(c2048, "ternary", None)
    assert "a nominal machine (`headrace bench machine` measures this one)" in found.explain()
    assert found.total_bytes == plan_compression(c2048, "ternary", "a6000-1ssd").total_bytes


def test_less_host_memory_takes_more_passes_and_never_less_time(c2048: Path) -> None:
    unsaid = plan_compression(c2048, "ternary", "a6000-1ssd")
    found = [
        plan_compression(c2048, "ternary", "a6000-1ssd", budget=Budget(host=each)) for each in ("60GiB", "24GiB", "200MiB")
    ]
    assert unsaid.warning is None
    assert "warning" not in unsaid.to_json()
    seconds = [each.total_seconds for each in found]
    assert unsaid.total_seconds < seconds[0] < seconds[1] < seconds[2], "its two forms of a block alone take more than 60 GiB"
    assert all("a block, but one expert, twice" in each.memory_bytes for each in found)
    assert [bool(each.warning) for each in found] == [False, False, True]
    assert found[-1].warning
    assert found[-1].warning in found[-1].explain()
    with pytest.raises(ConfigError, match=r"host memory: 9 TiB given, .* has .*; give less"):
        plan_compression(c2048, "ternary", "a6000-1ssd", budget=Budget(host="9TiB"))


def test_the_command_takes_host_memory_and_names_what_it_ignores(c2048: Path) -> None:
    words = ["plan", str(c2048), "--compress", "ternary", "--machine", "a6000-1ssd", "--json"]

    def asked(*more: str) -> dict[str, Any]:
        said = CliRunner().invoke(app, [*words, *more])
        assert said.exit_code == 0, said.output
        values: dict[str, Any] = json.loads(said.output)
        return values

    plain, small = asked(), asked("--host-memory", "8GiB")
    assert plain["without_effect"] == small["without_effect"] == []
    assert small["seconds"] != plain["seconds"]
    ignored = ["--compute-dtype", "float32", "--device-memory", "8GiB", "--ssd", str(c2048.parent), "--learning-rate", "1e-3"]
    found = asked(*ignored)
    assert found.pop("without_effect") == ["compute_dtype", "device_memory", "learning_rate", "ssd"]
    assert found == {name: value for name, value in plain.items() if name != "without_effect"}
