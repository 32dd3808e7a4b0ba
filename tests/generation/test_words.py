"""`headrace generate` as a user calls it: answers on stdout, those of transformers, and one line for what is wrong."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from headrace.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `headrace generate` and returns exit code, stdout and stderr."""

    def generate(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["generate", *map(str, words)])
        out = capsys.readouterr()
        return int(left.value.code or 0), out.out, out.err

    return generate


def own_text(model: Path, text: str, settings: dict[str, Any], seed: int = 0) -> str:
    """What transformers itself answers."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = tokenizer([text], add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = stock.generate(ids, attention_mask=torch.ones_like(ids), use_cache=True, pad_token_id=0, **settings)
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


def test_a_prompt_is_answered_as_transformers_answers_it(model: Path, run: Run) -> None:
    greedy = {"max_new_tokens": 12, "do_sample": False}
    code, out, err = run(model, "--prompt", "water", "--max-new-tokens", 12, "--temperature", 0, "--host-memory", "4GiB")
    assert code == 0, err
    assert out == own_text(model, "<user>water<eos><a>", greedy) + "\n"
    assert "seat" in err  # the plan, before
    assert err.splitlines()[-1].startswith("measured ")


def test_a_raw_prompt_is_sampled_with_its_seed(model: Path, run: Run) -> None:
    sampled = {"max_new_tokens": 9, "do_sample": True, "temperature": 0.7, "top_p": 0.9}
    words = ("--max-new-tokens", 9, "--temperature", 0.7, "--top-p", 0.9, "--seed", 5, "--host-memory", "4GiB")
    code, out, _ = run(model, "--raw", "--prompt", "turbine", *words)
    assert (code, out) == (0, own_text(model, "turbine", sampled, seed=5) + "\n")


def test_a_text_that_stops_is_not_printed(model: Path, run: Run) -> None:
    greedy = {"max_new_tokens": 12, "do_sample": False}
    whole = own_text(model, "<user>water<eos><a>", greedy)
    stop = whole[4:6]
    _, out, _ = run(model, "--prompt", "water", "--max-new-tokens", 12, "--temperature", 0, "--stop", stop)
    assert out == whole[: whole.index(stop)] + "\n"


def test_standard_input_is_a_prompt(model: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("water"))
    code, out, _ = run(model, "--prompt", "-", "--max-new-tokens", 4, "--temperature", 0)
    assert (code, out) == (0, own_text(model, "<user>water<eos><a>", {"max_new_tokens": 4, "do_sample": False}) + "\n")


BAD = {
    "too long": (["--raw", "--prompt", "w" * 70], "positions"),
    "too many new": (["--raw", "--prompt", "w", "--max-new-tokens", "64"], "--max-new-tokens 63"),
    "empty": (["--raw", "--prompt", ""], "empty"),
    "no UTF-8": (["--prompt", "w \udcff"], "half a character"),
    "no UTF-8 to stop at": (["--prompt", "w", "--stop", "\udcff"], "stop"),
    "no memory": (["--prompt", "w", "--host-memory", "200MiB"], "--host-memory"),
    "empty stop": (["--prompt", "w", "--stop", ""], "stop"),
    "temperature": (["--prompt", "w", "--temperature", "-1"], "temperature"),
    "both": (["--prompt", "w", "--input", "x.jsonl", "--output", "y.jsonl"], "prompt and input"),
    "no output": (["--input", "x.jsonl"], "input and output"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said_in_one_line(name: str, model: Path, run: Run) -> None:
    words, expected = BAD[name]
    code, out, err = run(model, *words)
    assert (code, out) == (2, "")
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert expected in last


def test_an_unknown_end_and_a_missing_template_are_said(model: Path, run: Run, tmp_path: Path) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5000}))
    code, _, err = run(tmp_path, "--prompt", "w")
    assert code == 2
    assert "eos_token_id 5000" in err
    (tmp_path / "chat_template.jinja").unlink()
    code, _, err = run(tmp_path, "--prompt", "w", "--system", "be brief")
    assert code == 2
    assert "chat template" in err


@pytest.mark.parametrize("drafts", ["lookup", "assistant"])
def test_drafted_tokens_change_nothing(drafts: str, model: Path, run: Run) -> None:
    """Drafts are checked by the model itself: the greedy text is that without them."""
    words = ("--prompt-lookup", 3) if drafts == "lookup" else ("--assistant", model)
    code, out, err = run(model, "--prompt", "water water", "--max-new-tokens", 12, "--temperature", 0, *words)
    assert code == 0, err
    assert out == own_text(model, "<user>water water<eos><a>", {"max_new_tokens": 12, "do_sample": False}) + "\n"


def test_a_conversation_goes_on_from_what_was_said(
    model: Path, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("water\n\nflows\n/bye\n"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, out, err = run(model, "--max-new-tokens", 4, "--temperature", 0)
    assert code == 0, err
    greedy = {"max_new_tokens": 4, "do_sample": False}
    first = own_text(model, "<user>water<eos><a>", greedy)
    second = own_text(model, f"<user>water<eos><assistant>{first}<eos><user>flows<eos><a>", greedy)
    assert out == f"{first}\n{second}\n"
