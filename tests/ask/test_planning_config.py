"""A configuration must name its own sizes: one clear message for each that cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
from planned_models import gpt3_175b, llama_small, saved

from headrace.ask.model_config import check_positions, position_limit, read_parts
from headrace.terms.errors import ConfigError, ModelError


def test_a_directory_and_its_file_are_the_same_model(tmp_path: Path) -> None:
    directory = saved(tmp_path / "model", gpt3_175b())
    assert read_parts(directory)[0].to_dict() == read_parts(str(directory / "config.json"))[0].to_dict()
    assert position_limit(read_parts(directory)[0]) == 2048


@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "intermediate_size"]
)
def test_a_missing_size_is_not_taken_from_another_model(tmp_path: Path, field: str) -> None:
    with pytest.raises(ModelError, match=f"{field}.* missing"):
        read_parts(saved(tmp_path / "model", llama_small(), **{field: None}))


def test_a_missing_size_is_called_as_the_file_would_call_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="n_layer missing"):
        read_parts(saved(tmp_path / "model", gpt3_175b(), n_layer=None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "model_type is None"),
        ({"model_type": "no-such-architecture"}, "does not accept"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": -5}, "vocab_size"),
        ({"hidden_size": "wide"}, "config.json"),
    ],
)
def test_absurd_fields_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_parts(saved(tmp_path / "model", llama_small(), **changes))


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        read_parts(tmp_path / "nowhere")[0]
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_parts(tmp_path)[0]
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        read_parts(tmp_path)[0]
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelError, match="found a list"):
        read_parts(tmp_path)[0]


def test_positions_limit_the_sequence() -> None:
    check_positions(llama_small(), 1024)
    with pytest.raises(ConfigError, match="1025 is more than the 1024"):
        check_positions(llama_small(), 1025)
