"""What names no model or data is refused before torch is imported, in the words that would come later."""

import subprocess
import sys
from pathlib import Path

import pytest
from tiers import sampled

from headrace.cli.app import main

PROGRAM = """
import sys
from headrace.cli.app import main
try:
    main(sys.argv[1:])
finally:
    sys.stderr.write(f"torch: {'torch' in sys.modules}\\n")
"""
REFUSED = {
    "train": ["train", "NOTHING", "x.jsonl"],
    "train, data": ["train", "MODEL", "x.jsonl"],
    "train, kind of data": ["train", "MODEL", "MODEL/config.txt", "max_steps=1"],
    "node": ["node", "MODEL", "x.jsonl", "--listen", "127.0.0.1:0"],
    "plan": ["plan", "NOTHING"],
    "plan, machine": ["plan", "MODEL", "--machine", "MODEL/none.json"],
    "generate": ["generate", "NOTHING", "--prompt", "a"],
    "eval": ["eval", "NOTHING", "--data", "y.jsonl"],
    "eval, data": ["eval", "MODEL", "--data", "x.jsonl"],
    "compress": ["compress", "NOTHING", "OUT", "--to", "int4", "--data", "y.jsonl"],
    "decompress": ["decompress", "NOTHING", "OUT"],
}


def words_of(name: str, folder: Path) -> list[str]:
    (folder / "config.json").write_text("{}")
    (folder / "config.txt").write_text("")
    (folder / "y.jsonl").write_text('{"text": "a"}\n')
    names = ("x.jsonl", "y.jsonl")
    places = {name: str(folder / name) for name in names} | {
        "NOTHING": str(folder / "nothing"),
        "OUT": str(folder / "out"),
        "MODEL": str(folder),
    }
    return [places.get(word, word.replace("MODEL", str(folder))) for word in REFUSED[name]]


@pytest.mark.parametrize("name", sampled(REFUSED))
def test_what_is_not_there_is_refused_before_torch_is_imported(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, *words_of(name, tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    error, torch = done.stderr.splitlines()
    assert (done.returncode, torch) == (2, "torch: False")
    assert str(tmp_path) in error


@pytest.mark.parametrize("name", [name for name in REFUSED if "data" not in name and name != "node"])
def test_the_same_words_are_said_later(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, said = words_of(name, tmp_path), []
    for looks in (True, False):
        if not looks:
            for look in ("look_at_model", "look_at_words", "look_at_place", "look_at_configuration"):
                monkeypatch.setattr(f"headrace.cli.app.{look}", lambda *ignored: None)
        with pytest.raises(SystemExit) as exit:
            main(words)
        assert exit.value.code == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]


CHOICES = {
    "--optimizer foo": "not one of adamw",
    "--gradient lsp --adapter lora": "give one of them",
    "--gradient lsp --optimizer adafactor": "use adamw",
}


@pytest.mark.wide
@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_choices_that_cannot_be_are_refused_before_transformers_is_imported(command: str, choices: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "y.jsonl").write_text('{"text": "a"}\n')
    data = [str(tmp_path / "y.jsonl")] if command == "train" else []
    program = PROGRAM.replace("torch", "transformers")
    words = [sys.executable, "-c", program, command, str(tmp_path), *data, *choices.split()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    error, imported = done.stderr.splitlines()
    assert (done.returncode, imported) == (2, "transformers: False")
    assert CHOICES[choices] in error
