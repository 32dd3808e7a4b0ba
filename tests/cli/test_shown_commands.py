"""Every command that a page shows is one that there is: its options, their values and what they say together are understood.

Nothing is run, and no place that a command names is looked at. Also here: what the list of features says of each.

Run: pytest tests/cli/test_shown_commands.py
"""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from headrace.cli.app import app, main
from headrace.cli.configuration import config_of, plan_options_of
from headrace.cli.first_look import look_at_choices, split_words
from headrace.terms.options.plan_options import PlanOptions
from headrace.terms.options.run_options import NodeOptions, RunOptions

ROOT = Path(__file__).parents[2]
WRITTEN_FOR_ADDERS = "extending.md"  # its commands have what a reader is about to add
SHOWN = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != WRITTEN_FOR_ADDERS]
FEATURES = Path(__file__).parent / "features.md"
PAGES = [ROOT / "README.md", FEATURES, *SHOWN]
# A model of half a billion parameters in eight blocks: the search for its plan takes seconds.
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
NUM_FEATURES = 86
GROUP: Any = typer.main.get_command(app)

_CODE = re.compile(r"`([^`\n]+)`|^ {4,}(\S.*)$|^(?:\$ )?(headrace .*)$", re.MULTILINE)
# Forms with choices in them, what goes on elsewhere, and help, which ends the process.
_LEFT_OUT = re.compile(r"\.\.\.|\[|\\\||COMMAND| -h\b|--help")
_ROW = re.compile(r"^\| (.+?) \| (yes|partly|no) \| (.+) \|$", re.MULTILINE)
_SHOWN = re.compile(r"`(?:headrace|make|torchrun|kill|engine)[ .]|`tests/|\]\(|the same|`final/|metrics\.jsonl")


def commands_in(text: str) -> Iterator[str]:
    """Yield the commands that a page shows, each without the word `headrace` and what follows a semicolon.

    A command may go on after a backslash.
    """
    for found in _CODE.finditer(re.sub(r"\s*\\\n\s*", " ", text)):
        for piece in re.split(r"; (?=headrace )", next(filter(None, found.groups()))):
            shown = re.search(r"(?:^|\$ |-m )headrace (\w.*)", piece)
            if shown and not _LEFT_OUT.search(shown[1]):
                yield shown[1]


def understand(shown: str) -> None:
    """Parse a command, and see that its options can be what they are together."""
    name, *words = shlex.split(shown, comments=True)
    command = GROUP.commands[name]
    if hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    try:
        context = command.make_context(name, words)
    except Exception as error:
        if type(error).__name__ == "MissingParameter":  # the page names the command, and no places
            return
        raise
    kind = {"train": RunOptions, "node": NodeOptions, "plan": PlanOptions}.get(name)
    if kind is None or (name == "train" and context.params["node"]):
        return
    keys = set(kind.keys()) - {"model", "data"}
    given = {key: value for key, value in context.params.items() if key in keys and value not in (None, [], ())}
    places = ["MODEL", "DATA", *split_words(context.params["words"])[1]]
    options = plan_options_of(places, (), given)[0] if kind is PlanOptions else config_of(places, given, kind)
    look_at_choices(options, at_node=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_are_understood(page: Path) -> None:
    wrong = []
    for shown in commands_in(page.read_text(encoding="utf-8")):
        try:
            understand(shown)
        except Exception as error:
            wrong.append(f"headrace {shown}: {type(error).__name__}: {error}")
    assert wrong == []


def plans() -> list[str]:
    """Return the plans that the page of ways asks for, of machines that need not be here."""
    found = {each for each in commands_in((ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")) if "--machine" in each}
    return sorted(found)


@pytest.mark.deep
@pytest.mark.parametrize("shown", plans())
def test_the_plans_of_a_page_are_made(shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    words = [str(config) if word in ("MODEL", "config.json") else word for word in shlex.split(shown, comments=True)]
    with pytest.raises(SystemExit) as left:
        main(words)
    said = capsys.readouterr()
    assert not left.value.code, said.err
    assert "fits      yes" in said.out or "speed" in said.out or "tokens/s" in said.out


def test_commands_are_found_and_wrong_ones_are_seen() -> None:
    page = "Say `headrace resume RUN` or\n\n    headrace train M D --report-to wandb   # loss\n"
    page += "    $ headrace eval M; headrace clean D\n"
    assert list(commands_in(page)) == ["resume RUN", "train M D --report-to wandb   # loss", "eval M", "clean D"]
    for wrong in ("trane M D", "train M D --repot-to wandb", "train M D --report-to paper", "train M D --optimizer adamn"):
        with pytest.raises(Exception, match=r".+"):
            understand(wrong)


def test_each_feature_is_shown_by_a_command_or_a_test_or_says_why_not() -> None:
    rows = _ROW.findall(FEATURES.read_text(encoding="utf-8"))
    assert len({feature for feature, _, _ in rows}) == NUM_FEATURES
    assert [feature for feature, answer, proof in rows if answer == "yes" and not _SHOWN.search(proof)] == []
    assert [feature for feature, answer, proof in rows if answer != "yes" and len(proof.split()) < 4] == []
