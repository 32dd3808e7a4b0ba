"""What ends a line: a text in its answer alone, and logits that are not finite, which end no other line.

Run: pytest tests/generation/uses/test_watching.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from talking_model import save_talking_model
from transformers import AutoTokenizer

from headrace.cli import main

WORDS = ("--max-new-tokens", "6", "--host-memory", "4GiB", "--raw")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talking_model(tmp_path_factory.mktemp("watched") / "model")


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a number for the sign q: what has read one has no logits."""
    folder = save_talking_model(tmp_path_factory.mktemp("damaged") / "model")
    (token,) = AutoTokenizer.from_pretrained(folder)("q", add_special_tokens=False).input_ids
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as file:
            if "model.embed_tokens.weight" not in file.keys():  # noqa: SIM118
                continue
        tensors = load_file(shard)
        tensors["model.embed_tokens.weight"][token] = torch.nan
        save_file(tensors, shard, metadata={"format": "pt"})
    return folder


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as left:
        main(["generate", *map(str, words)])
    return int(left.value.code or 0)


def answered(model: Path, folder: Path, lines: list[dict[str, Any]], *words: object) -> tuple[int, list[dict[str, Any]]]:
    (folder / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "o.jsonl").unlink(missing_ok=True)
    code = run(model, "--input", folder / "p.jsonl", "--output", folder / "o.jsonl", *WORDS, *words)
    return code, [json.loads(line) for line in (folder / "o.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_line_without_finite_logits_fails_alone(temperature: int, damaged: Path, tmp_path: Path) -> None:
    words = ("--temperature", temperature, "--rows", 2)
    code, (good, bad) = answered(damaged, tmp_path, [{"prompt": "water"}, {"prompt": "waqer"}], *words)
    assert code == 1
    assert good["finish_reason"] in ("stop", "length")
    assert "line 2: the logits of token 1 are not finite" in bad["error"]
    assert "completion" not in bad
    _, (alone, _) = answered(damaged, tmp_path, [{"prompt": "water"}, {"prompt": "wader"}], *words)
    assert good["completion"] == alone["completion"]


def test_a_prompt_without_finite_logits_is_one_line(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for temperature in (0, 1):
        assert run(damaged, "--prompt", "q", "--temperature", temperature, *WORDS) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.splitlines()[-1].startswith("error: the logits of token 1 are not finite")


def test_stops_are_looked_for_in_the_answer_alone(model: Path, tmp_path: Path) -> None:
    _, (whole,) = answered(model, tmp_path, [{"prompt": "water"}], "--temperature", 0)
    first = whole["completion"][:2]
    across = [{"prompt": "water", "stop": ["r" + first[0]]}, {"prompt": "water", "stop": [first]}]
    _, (over_prompt, across_tokens) = answered(model, tmp_path, across, "--temperature", 0)
    assert over_prompt["completion"] == whole["completion"], "the end of the prompt is no part of the answer"
    assert (across_tokens["completion"], across_tokens["finish_reason"]) == ("", "stop")
    assert across_tokens["completion_tokens"] <= 2


def test_rows_that_stop_early_have_the_tokens_up_to_there(model: Path, tmp_path: Path) -> None:
    """One row of two stops; what fills it up, or what it would have said, is not counted."""
    prompts = [{"prompt": "water"}, {"prompt": "wader"}]
    _, whole = answered(model, tmp_path, prompts, "--temperature", 0, "--rows", 2)
    stop = whole[0]["completion"][1]
    _, both = answered(model, tmp_path, prompts, "--temperature", 0, "--rows", 2, "--stop", stop)
    for found, own in zip(both, whole, strict=True):
        assert found["completion"] == own["completion"].split(stop)[0]
        assert (found["finish_reason"] == "stop") == (stop in own["completion"])
    assert both[0]["completion_tokens"] == len(both[0]["completion"].encode()) + 1
