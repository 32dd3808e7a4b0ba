"""Help is short, in groups, and says what things do.

Run: pytest tests/cli/test_help.py
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from headrace.cli.app import app, main
from headrace.cli.sections import COMMANDS, asked_of
from headrace.terms.options.compress_options import CompressOptions
from headrace.terms.options.declared import Declaration, Group
from headrace.terms.options.eval_options import EvalOptions
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.options.option_kinds import OneOf
from headrace.terms.options.plan_options import PlanOptions
from headrace.terms.options.run_options import NodeOptions, RunOptions
from headrace.terms.options.serve_options import ServeOptions
from headrace.update.rules.table import RULES
from headrace.update.wires import WIRES

MOST_WORDS = 30
CLASSES = (RunOptions, NodeOptions, PlanOptions, GenerateOptions, ServeOptions, EvalOptions, CompressOptions)


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each command with the words that call it."""
    group = group or typer.main.get_command(app)
    for name, command in group.commands.items():
        yield (*path, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


def declarations() -> Iterator[Declaration]:
    for kind in (*RULES, *WIRES):
        yield from kind.settings()
    for declared in CLASSES:
        yield from declared.declarations()


def only_lists_values(text: str, values: tuple[str, ...] = ()) -> bool:
    """Return whether `text` says no more than which values there are."""
    left = set(re.findall(r"\w+", text)) - set(values) - {"or", "and", "may", "be", "given", "twice", "repeatable"}
    return not left or re.fullmatch(r"`?\w+`?(, `?\w+`?)* or `?\w+`?[.;].*", text) is not None


def long_sentences(text: str) -> list[str]:
    return [each for each in re.split(r"(?<=[.;:?!])\s", text) if len(each.split()) > MOST_WORDS]


def test_help_says_what_an_option_does() -> None:
    said = {(each.key, each.help or each.row): each for each in declarations()}
    wrong = [
        key
        for key, each in said.items()
        if only_lists_values(each.help or each.row, each.kind.names if isinstance(each.kind, OneOf) else ())
    ]
    assert wrong == []
    assert only_lists_values("constant, linear or cosine.", ("constant", "linear", "cosine"))
    assert only_lists_values("tensorboard or trace; may be given twice.")


def test_sentences_of_help_are_short() -> None:
    texts = [each.help for each in declarations()]
    for _, command in commands():
        texts += [command.help or "", *(getattr(each, "help", None) or "" for each in command.params)]
    assert [sentence for text in texts for sentence in long_sentences(text)] == []
    assert long_sentences("word " * 31)
    assert all(command.help for _, command in commands())


@pytest.mark.parametrize("words", [(), *(path for path, _ in commands())], ids=" ".join)
def test_every_command_has_both_forms_of_help(words: tuple[str, ...]) -> None:
    short, long = (CliRunner().invoke(app, [*words, flag]) for flag in ("-h", "--help"))
    assert (short.exit_code, short.output) == (0, long.output)
    assert "Usage: " in short.output


def test_commands_stand_under_what_one_wants_to_do() -> None:
    told = CliRunner().invoke(app, ["-h"]).output
    places = [told.index(f"\n{section}:\n") for section in COMMANDS]
    assert places == sorted(places)
    assert "\nCommands:" not in told, "a command without a section"


def test_the_page_of_commands_has_them_all() -> None:
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
    missing = [" ".join(path) for path, command in commands() if f"`headrace {' '.join(path)} " not in page]
    assert missing == []


@pytest.mark.parametrize(
    ("command", "often"), [("train", 10), ("plan", 10), ("node", 10), ("generate", 7), ("serve", 6), ("compress", 4)]
)
def test_options_stand_in_groups_the_most_used_first(command: str, often: int) -> None:
    told = CliRunner().invoke(app, [command, "-h"]).output
    sections = dict(re.findall(r"^(\w[\w ]+):\n((?:  .*\n|\n)+)", told, re.MULTILINE))
    names = [name for name in sections if name != "Arguments"]
    assert names[0] == Group.OFTEN
    assert len(re.findall(r"^  --", sections[Group.OFTEN], re.MULTILINE)) == often
    known = [name for name in names if name in list(Group)]
    assert known == [str(group) for group in Group if group in known]
    assert re.findall(r"^  (-\S+)", sections[Group.OTHER], re.MULTILINE) <= ["-h,", "--json"], "an option without a group"


def test_the_readme_is_a_first_screen() -> None:
    lines = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 115
    assert [line for line in lines if len(line) > 128] == []
    assert sum(len(line.split()) for line in lines) <= 1450


def test_help_imports_neither_rich_nor_what_computes() -> None:
    code = (
        "import sys\nfrom headrace.cli import main\n"
        "try:\n main(['train', '-h'])\nexcept SystemExit:\n pass\n"
        "print([m for m in ('rich', 'torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("[]")


def test_help_of_all_imports_less_than_that_of_a_command() -> None:
    """Besides Typer nothing is imported that is not Python's or ours: `headrace --help` takes 0.3 seconds of a processor."""
    code = (
        "import sys\nfrom headrace.cli import main\n"
        "try:\n main(['--help'])\nexcept SystemExit:\n pass\n"
        "found = {m.split('.')[0] for m in sys.modules} - sys.stdlib_module_names\n"
        "files = {m: getattr(sys.modules[m], '__file__', None) or '' for m in found}\n"
        "print(sorted(m for m in found if 'site-packages' in files[m]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = set(re.findall(r"'(\w+)'", done.stdout.splitlines()[-1]))
    assert found - {"_distutils_hack", "annotated_doc", "colorama", "shellingham", "typing_extensions"} == {"typer"}


def test_a_command_alone_says_what_it_says_among_all(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["train"], ["bench", "machine"], ["plan"]):
        asked = [*words, "--help"]
        whole, alone = (CliRunner().invoke(each, asked, prog_name="headrace") for each in (app, asked_of(app, asked)))
        assert (alone.exit_code, alone.output) == (0, whole.output)
    with pytest.raises(SystemExit):
        main(["trian"])
    assert "Did you mean 'train'?" in capsys.readouterr().err


def test_a_shell_that_completes_has_all_options() -> None:
    asks = {"_HEADRACE_COMPLETE": "complete_bash", "COMP_WORDS": "headrace train --opt", "COMP_CWORD": "2"}
    code = "import sys\nsys.argv = ['headrace']\nfrom headrace.cli import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | asks)
    assert done.stdout.split() == ["--optimizer"]
