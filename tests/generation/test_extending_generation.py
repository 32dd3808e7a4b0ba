"""The worked examples of docs/extending.md: an option of generation in one file, a kind of run in three."""

import json
from pathlib import Path

import pytest
import torch
from extending import apply, run
from transformers import AutoModelForCausalLM, AutoTokenizer

LINES = [{"prompt": "water water water"}, {"prompt": "water water water", "repetition_penalty": 5.0}]
# Commands in one process: each is short beside the import of transformers.
COMMANDS = """
import json, sys
from headrace.cli.app import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as end:
        assert end.code == 0, (words, end.code)
    print("---", flush=True)
"""


def outputs(folder: Path, *commands: list[str]) -> list[str]:
    """Run commands of the copy in `folder`; return what each prints."""
    return run(folder, "-c", COMMANDS, json.dumps(commands)).split("---\n")[:-1]


@pytest.mark.wide
def test_an_option_of_generation_is_one_file(model: Path, tmp_path: Path) -> None:
    assert apply("An option of generation", tmp_path) == {"headrace/terms/options/generate_options.py"}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES), encoding="utf-8")
    plain = ["generate", str(model), "--max-new-tokens", "12", "--temperature", "0", "--host-memory", "2GiB"]
    one, job = ["--raw", "--prompt", "water water water"], ["--raw", "--input", "in.jsonl", "--output", "out.jsonl"]
    penalty = ["--repetition-penalty", "5"]
    help_text, without, with_it, _ = outputs(tmp_path, ["generate", "--help"], plain + one, plain + one + penalty, plain + job)
    assert "--repetition-penalty" in help_text
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(LINES[0]["prompt"], return_tensors="pt")
    stock = AutoModelForCausalLM.from_pretrained(model)
    found = stock.generate(**ids, max_new_tokens=12, do_sample=False, repetition_penalty=5.0)[0, ids["input_ids"].shape[1] :]
    assert with_it == tokenizer.decode(found, skip_special_tokens=True) + "\n" != without
    answers = [json.loads(line)["completion"] + "\n" for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert answers == [without, with_it]


@pytest.mark.wide
def test_a_kind_of_run_is_three_files(model: Path, tmp_path: Path) -> None:
    assert apply("A kind of run", tmp_path) == {
        f"headrace/{name}.py" for name in ("cli/app", "cli/embedding", "generate/uses/embedding")
    }
    texts = ["water", "to the turbine", "flows"]
    commands, lines = outputs(tmp_path, ["--help"], ["embed", str(model), *texts, "--host-memory", "2GiB"])
    assert "embed" in commands
    stock, tokenizer, seen = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model), []
    stock.model.layers[-1].register_forward_hook(lambda module, given, hidden: seen.append(hidden[0].mean(dim=0)))
    for text, line in zip(texts, lines.splitlines(), strict=True):
        stock(**tokenizer(text, return_tensors="pt"))
        torch.testing.assert_close(torch.tensor(json.loads(line)), seen[-1])
