"""Each causal model that the installed transformers registers: what comes of it, as the table of outcomes has it.

`make architectures` runs all (some fifteen minutes) and prints what changed; `make architectures RENEW=1` writes the table.
`make deep` runs some. Run: pytest tests/architectures -m deep
"""

import json
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from ways import outcomes_of

TABLE = json.loads(Path(__file__).with_name("outcomes.json").read_text(encoding="utf-8"))
DEEP = [
    "llama",
    "gemma2",
    "gpt_oss",
    "mamba2",
    "jamba",
    "qwen3_moe",
    "deepseek_v3",
    "phi3",
    "lfm2",
    "roberta",
    "bart",
    "zaya",
    "jetmoe",
]


def test_every_registered_kind_has_a_row() -> None:
    if transformers.__version__ == TABLE["transformers"]:
        assert sorted(TABLE["outcomes"]) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_no_row_says_that_something_is_wrong() -> None:
    wrong = [(kind, way) for kind, row in TABLE["outcomes"].items() for way, found in row.items() if found.startswith("WRONG")]
    assert not wrong


def without_reason(outcome: str) -> str:
    """Return an outcome, of a refusal its first two parts: the words of a reason are no outcome."""
    return ":".join(outcome.split(":")[:2])


@pytest.mark.deep
@pytest.mark.parametrize("kind", DEEP)
def test_an_architecture_has_its_outcomes(kind: str, tmp_path: Path) -> None:
    found, wanted = outcomes_of(kind, tmp_path), TABLE["outcomes"][kind]
    assert {way: without_reason(text) for way, text in found.items()} == {
        way: without_reason(text) for way, text in wanted.items()
    }
