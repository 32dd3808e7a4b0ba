"""Answers of `headrace plan` are kept: the same question is answered without torch, and another one anew."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from headrace.cli.app import main
from headrace.cli.kept_plans import find_answer, keep_answer, kept_place
from headrace.terms.options.plan_options import PlanOptions

PROGRAM = """
import sys
from headrace.cli.app import main
try:
    main(sys.argv[1:])
finally:
    sys.stderr.write(f"{[name for name in ('torch', 'transformers') if name in sys.modules]}\\n")
"""


def model(folder: Path, **sizes: Any) -> Path:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 256}
    LlamaConfig(**shape | sizes, dtype="bfloat16").save_pretrained(folder)
    return folder


def test_a_kept_answer_needs_no_torch_and_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = [
        "plan",
        str(model(tmp_path / "model")),
        "--generate",
        "--machine",
        "t4",
        "--prompt-length",
        "16",
        "--new-tokens",
        "4",
    ]
    said = []
    for form in ("--json", "--verbose"):
        with pytest.raises(SystemExit):
            main([*words, form])
        said.append(capfd.readouterr().out)
    for form, expected in zip(("--json", "--verbose"), said, strict=True):
        done = subprocess.run([sys.executable, "-c", PROGRAM, *words, form], capture_output=True, text=True, timeout=280)
        assert (done.returncode, done.stderr, done.stdout) == (0, "[]\n", expected)


def test_another_question_has_another_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, profile = model(tmp_path / "model"), tmp_path / "rig.json"
    (tmp_path / "cache" / "headrace").mkdir(parents=True)
    profile.write_text("{}")

    def place(*more: Any, asked: tuple[str, ...] = (), **options: Any) -> Path | None:
        return kept_place(PlanOptions(**{"model": folder, "machine": "t4"} | options), asked, *more)

    found = [
        place(),
        place(1),
        place(asked=("seed",)),
        place(host_memory="1GiB"),
        place(machine="h100"),
        place(machine=str(profile)),
    ]
    profile.write_text("{ }")
    found.append(place(machine=str(profile)))
    model(folder, num_hidden_layers=3)
    found.append(place())
    monkeypatch.setattr("headrace.cli.kept_plans.version", lambda name: "another")
    found.append(place())
    assert None not in found
    assert len(set(found)) == len(found)
    assert place(machine=None) is None, "what is free here changes"
    assert place(ssd=(tmp_path,)) is None, "so do files"
    assert place(html=tmp_path / "new.html") is None, "a page is drawn each time"
    (folder / "model.safetensors").touch()
    assert place() is None


@given(st.binary(max_size=40) | st.builds(lambda value: json.dumps(value).encode(), st.lists(st.integers())))
def test_what_is_no_answer_is_none(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("kept") / "a.json"
    path.write_bytes(content)
    assert find_answer(path) in (None, {})
    keep_answer(path, {"brief": "a line"})
    assert find_answer(path) == {"brief": "a line"}
