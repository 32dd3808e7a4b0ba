"""What the page on preferences shows is done as it stands, with a small model: its two runs.

README.md and docs/start.md are typed by `tests/demo/test_typed_commands.py`.

Run: pytest tests/cli/test_start_page.py -m deep
"""

import shlex
from pathlib import Path

import pytest
from bad_worlds import World
from test_shown_commands import commands_in

from headrace.cli import main

DOCS = Path(__file__).parents[2] / "docs"
LEFT_OUT = ("resume", "doctor")  # a run that has ended is not resumed; drives are measured elsewhere


def do(page: str, world: World, **places: str) -> None:
    for shown in commands_in((DOCS / page).read_text(encoding="utf-8")):
        words = [places.get(word, word) for word in shlex.split(shown, comments=True)]
        if len(words) < 2 or words[0] in LEFT_OUT or words[1].startswith("-"):
            continue
        if words[0] in ("train", "plan"):
            words += ["--sequence-length", "64", "--tokens-per-step", "128", "--ssd", str(world.ssd)]
        with pytest.raises(SystemExit) as left:
            main(words)
        assert world.capsys is not None
        assert not left.value.code, (shown, world.capsys.readouterr().err)


@pytest.mark.deep
def test_an_adapter_from_conversations_to_preferences(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world.folder)
    Path("chats.jsonl").write_text('{"prompt": "water", "completion": " flows"}\n' * 8)
    Path("pairs.jsonl").write_text('{"prompt": "water", "chosen": " flows", "rejected": " burns"}\n' * 8)
    do("preferences.md", world, MODEL=str(world.model))
    assert "rewards/margins" in (world.folder / "dpo" / "metrics.jsonl").read_text()
