"""A published config.json may say that weights are coded, where there are no files of weights yet."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.ask.answer import Opened, open_question
from headrace.terms.errors import ConfigError, ModelError
from headrace.terms.options.options import Options

TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def opened(directory: Path, *, coded: bool, **options: Any) -> Opened:
    directory.mkdir()
    values = TINY | ({"quantization_config": FP8} if coded else {})
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    sizes: dict[str, Any] = {"machine": "rtx4090-4ssd", "tokens_per_step": 64, "sequence_length": 32}
    return open_question(directory, Options(**sizes, **options), here=False)


def test_full_training_of_a_coded_configuration_is_planned_as_of_decoded_weights(tmp_path: Path) -> None:
    plain, coded = opened(tmp_path / "plain", coded=False), opened(tmp_path / "coded", coded=True)
    assert [note for note in coded.notes if "coded as fp8 are planned as decoded" in note]
    assert coded.planner.quick_plan(coded.question) == plain.planner.quick_plan(plain.question)


def test_where_codes_stay_their_sizes_follow_from_the_configuration(tmp_path: Path) -> None:
    coded, plain = (opened(tmp_path / str(each), coded=each, adapter="lora") for each in (True, False))
    assert not [note for note in coded.notes if "planned as decoded" in note]
    read = [each.planner.quick_plan(each.question).peak("ssd") for each in (coded, plain)]
    assert read[0] <= read[1]
    trained = opened(tmp_path / "matrices", coded=True, train="matrices")
    with pytest.raises(ConfigError, match="cannot be trained in place"):
        trained.planner.quick_plan(trained.question)


def test_where_only_files_say_how_small_codes_are_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TINY, "quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises((ConfigError, ModelError), match="only its files say how small"):
        opened(tmp_path / "coded", coded=False, adapter="lora")
