"""The schema for editors takes what the options take, and refuses what they refuse.

Run: pytest tests/cli/test_run_schema.py
"""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.cli.schema import run_schema
from headrace.terms.errors import ConfigError
from headrace.terms.options.run_options import NodeOptions

LEAST = {"model": "m", "data": "d.jsonl"}
TAKEN: list[dict[str, Any]] = [
    {},
    {"data": ["a", {"path": "o/n", "split": "train", "weight": 0.5, "columns": {"messages": "conversation"}}]},
    {"host_memory": "16GiB", "device_memory": 10**10, "ssd": ["/a", "/b"], "learning_rate": 2e-5},
    {"packing": None, "eval_split": 0.02, "eval_steps": 5, "report_to": ["trackio", "trace"], "template_date": "2026-01-31"},
    {"optimizer": "sgd:momentum=0.9", "parameter_groups": [{"pattern": "embed", "weight_decay": 0}], "lr_schedule": "cosine"},
    {"listen": "127.0.0.1:1", "workers": "1:4", "gradient_sum": "tree", "grace": 5},
]
REFUSED: list[dict[str, Any]] = [
    {"learning_rat": 1.0},
    {"data": []},
    {"data": [{"name": "without a path"}]},
    {"data": [{"path": "d", "weight": 0}]},
    {"epochs": 0},
    {"max_steps": 0},
    {"max_steps": 1.5},
    {"packing": "perhaps"},
    {"lr_schedule": "square"},
    {"report_to": "paper"},
    {"parameter_groups": [{"pattern": "x", "rate": 1}]},
    {"host_memory": [1]},
    {"template_date": "tomorrow"},
    {"model": None},
]


def takes(values: dict[str, Any]) -> bool:
    return not list(jsonschema.Draft7Validator(run_schema()).iter_errors({**LEAST, **values}))


@pytest.mark.parametrize("values", TAKEN, ids=str)
def test_both_take(values: dict[str, Any]) -> None:
    assert takes(values)
    NodeOptions.of({**LEAST, **values})


@pytest.mark.parametrize("values", REFUSED, ids=str)
def test_both_refuse(values: dict[str, Any]) -> None:
    assert not takes(values)
    with pytest.raises(ConfigError):
        NodeOptions.of({**LEAST, **values})


def test_the_file_of_a_run_is_taken_whole() -> None:
    """A run directory's config.yaml has every key."""
    assert takes(NodeOptions.of(LEAST).to_json())


def test_the_command_gives_the_schema_of_all_keys(tmp_path: Path) -> None:
    jsonschema.Draft7Validator.check_schema(run_schema())
    assert set(run_schema()["properties"]) == set(NodeOptions.keys())
    assert json.loads(CliRunner().invoke(app, ["schema"]).output) == run_schema()
    out = tmp_path / "run.schema.json"
    assert CliRunner().invoke(app, ["schema", "--output", str(out)]).exit_code == 0
    assert json.loads(out.read_text()) == run_schema()
